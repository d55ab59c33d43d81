//! No bit of a run depends on the order of independent work, or on storage and waits.

use super::resume::kill;
use super::{BARE, GROWING, PPO, RANKS, REPLICAS, run};
use crate::common::process::output;
use crate::common::runs::{assert_same, outcome, with_images};
use crate::common::{Meristem, command_output, of_kind};
use crate::parts::UNEQUAL;

/// Checks that the bits of a run depend neither on the order of independent work nor on the number
/// of streams.
fn assert_independent_of_order(arguments: &str) {
    let m = with_images();
    let expected = run(&m, arguments, "one", 1);
    let other = format!("{arguments} --threads 3");
    assert_same(&run(&m, &other, "three", 2), &expected, "three lanes, another order");
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_bare_host_is_independent_of_the_order_on_the_device() {
    assert_independent_of_order(BARE);
    assert_independent_of_order(&format!("{BARE} --precision bf16"));
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_growing_host_is_independent_of_the_order_on_the_device() {
    assert_independent_of_order(GROWING);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_growing_host_with_rounded_factors_is_independent_of_the_order() {
    assert_independent_of_order(&format!("{GROWING} --precision tf32"));
}

/// D14: the fifth batch has no part for env 0, and the control splits differ. Streamed samples
/// change no bit, in another order and on another number of streams.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn envs_of_unequal_parts_are_independent_of_the_order_on_the_device() {
    let m = Meristem::new();
    let expected = run(&m, UNEQUAL, "resident", 1);
    let streamed = run(&m, &format!("{UNEQUAL} --data-budget 1KiB --threads 3"), "streamed", 2);
    assert_eq!(streamed.weights, expected.weights);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_policy_is_independent_of_the_order_on_the_device() {
    assert_independent_of_order(PPO);
}

/// A policy that makes layers wider, with more places in its heads, also of a host without slots:
/// in another order and killed.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn a_policy_that_widens_is_independent_of_the_order_and_resumes() {
    let wide = format!("{PPO} --policy-form set-widen --widen-by 0.5 --twin off");
    let hosts = "minimal --members host=cnn:channels=2,blocks=3,kernel=3|slotless.toml";
    let wide = wide.replace("minimal --slots r0", hosts);
    assert_independent_of_order(&wide);
    let m = with_images();
    let whole = run(&m, &wide, "wide", 1);
    assert!(!of_kind(&whole.events, "layer_widened").is_empty(), "nothing got wider");
    kill(&wide);
}

/// The heuristic makes layers wider by gradients that it measures; in another order and killed.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn measured_gradients_are_independent_of_the_order_and_resume() {
    let wide = "train --dataset arrays --data-root images.safetensors --preset quick \
         --host mlp:4,4 --controller heuristic --max-modules 0 --widen-by 0.5 --widen-pause 2 \
         --widen-trigger gradient_ratio:0.5 --widen-place natural_gradient --max-gap 99 \
         --parameters-per-image 99 --batch 16 --control-split 0.2 --envs 2 --steps 9 --twin off \
         --checkpoint-every 2 --quiet";
    assert_independent_of_order(wide);
    let m = with_images();
    let whole = run(&m, wide, "wide", 1);
    assert!(!of_kind(&whole.events, "layer_widened").is_empty(), "nothing got wider");
    kill(wide);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn replicas_are_independent_of_the_order_on_the_device() {
    assert_independent_of_order(REPLICAS);
}

#[test]
#[ignore = "needs a GPU or its stand-in"]
fn ranks_are_independent_of_the_order_on_the_device() {
    assert_independent_of_order(RANKS);
}

/// Streamed images, memory that is reused under a limit, launches that wait for their kernels, and
/// the race sanitizer change no bit of growing hosts, whose counterfactuals are one pass.
#[test]
#[ignore = "needs a GPU or its stand-in"]
fn storage_memory_and_waits_change_no_bit() {
    let m = with_images();
    let expected = run(&m, GROWING, "plain", 1);
    let reserved = |run: &str| {
        m.json(&format!("{run}/summary.json"))["memory"]["reserved_peak"].as_u64().unwrap()
    };
    // Without the images on the device, a run with ample memory reserves 31,232 bytes less.
    let limit = reserved("plain") - 30_000;
    let limited = format!("{GROWING} --data-budget 1KiB --device-memory {limit}");
    assert_same(&run(&m, &limited, "limited", 2), &expected, "streamed, with little memory");
    assert!(reserved("limited") <= limit);
    let mut command = m.command();
    let checked = format!("{GROWING} --data-budget 1KiB --devices cuda:0 --run-dir checked");
    command.args(checked.split_whitespace()).env("MERISTEM_STANDIN_SEED", "3");
    command.env("MERISTEM_LAUNCH_BLOCKING", "1").env("MERISTEM_SANITIZE", "1");
    let said = command_output(output(&mut command));
    assert_eq!(said.code, Some(0), "{}{}", said.stdout, said.stderr);
    assert_same(&outcome(&m, "checked"), &expected, "blocking, under the sanitizer");
}
