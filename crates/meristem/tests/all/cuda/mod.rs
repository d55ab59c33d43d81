//! Runs on a GPU, or on the stand-in driver (`cargo xtask standin cargo test …`).

#![cfg(unix)]

mod devices;
mod driver;
mod nccl;
mod order;
#[path = "../../../../comm/tests/all/common/port.rs"]
mod port;
mod resume;
mod streamed;

use crate::common::process::output;
use crate::common::runs::{Outcome, outcome};
use crate::common::{Meristem, command_output};

/// A few steps of hosts that do not grow.
const BARE: &str = "train --dataset arrays --data-root images.safetensors --controller none \
                    --host minimal --envs 3 --steps 3 --batch 16 --max-batches 4 \
                    --control-split 0.1 --augment crop,flip --checkpoint-every 1 --quiet";

/// Growing hosts: modules germinate, blend, are evaluated in one pass, and fossilize.
const GROWING: &str = "train --dataset arrays --data-root images.safetensors \
                       --controller heuristic --preset quick --host minimal --slots r0,r1 --envs 2 \
                       --rounds 1 --steps 16 --batch 16 --max-batches 2 --control-split 0.1 \
                       --checkpoint-every 2 --quiet";

/// A policy that learns in two short rounds.
const PPO: &str = "train --dataset arrays --data-root images.safetensors --controller ppo \
                   --policy-hidden 16 --host minimal --slots r0 --envs 2 --rounds 2 --steps 4 \
                   --batch 16 --max-batches 2 --control-split 0.2 --quiet";

/// One host trained by two ranks, which exchange the largest elements of their gradients.
const REPLICAS: &str = "train --dataset arrays --data-root images.safetensors --quiet \
                        --controller heuristic --preset quick --envs 1 --ranks 2 --steps 4 \
                        --host cnn:channels=8,blocks=2,kernel=3,pools=1 --data-parallel \
                        --exchange ok-topk:0.05 --batch 16 --max-batches 3 --control-split 0.2";

/// The same host, with local steps and differences of weights as eight bits.
const LOCAL: &str = "train --dataset arrays --data-root images.safetensors --quiet \
                     --controller heuristic --preset quick --envs 1 --ranks 2 --steps 4 \
                     --host cnn:channels=8,blocks=2,kernel=3,pools=1 --data-parallel \
                     --exchange diloco:2:int8 --batch 16 --max-batches 3 --control-split 0.2";

/// A policy learned by two ranks with one env each.
const RANKS: &str = "train --dataset arrays --data-root images.safetensors --controller ppo \
                     --policy-hidden 16 --host minimal --slots r0 --envs 2 --ranks 2 \
                     --exchange gtopk:0.02 --rounds 2 --steps 3 --batch 16 --max-batches 2 \
                     --control-split 0.2 --quiet";

/// Runs on the GPU. On the stand-in driver, `seed` determines every order that CUDA does not
/// specify.
fn run(m: &Meristem, arguments: &str, name: &str, seed: u32) -> Outcome {
    let mut command = m.command();
    let arguments = format!("{arguments} --devices cuda:0 --run-dir {name}");
    command.args(arguments.split_whitespace()).env("MERISTEM_STANDIN_SEED", seed.to_string());
    let said = command_output(output(&mut command));
    assert_eq!(said.code, Some(0), "{arguments}\n{}{}", said.stdout, said.stderr);
    outcome(m, name)
}
