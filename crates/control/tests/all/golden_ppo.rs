//! Four epochs of PPO on one round against PyTorch (`reference/ppo.py`): loss and its parts, the
//! gradient of every parameter and its norm, and the weights after each Adam step. The round has
//! eight heads, masks, floors, entropy floors, clipping of ratios and gradients, and terminations
//! within sequences.
//!
//! Tolerance: 1e-4 of a tensor's largest value, plus PyTorch's own error against f64 (at most 1e-5
//! of the largest value). A gradient is a sum over 33 rows through a dozen layers, each accurate to
//! about 1e-6. Adam divides by the root of small squares, which makes later epochs about ten times
//! less accurate.

use std::collections::BTreeMap;
use std::path::PathBuf;

use meristem_control::policy::{
    LossConfig, Policy, PolicyBatch, PolicyConfig, PolicyForm, PolicyInputs, PolicyShape, PpoPass,
};
use meristem_device::{Device, DeviceId, DeviceOptions, Element, Owner, Stream, Tensor};
use meristem_nn::graph::AdamConfig;
use meristem_nn::kernels::ppo::PpoReport;
use meristem_nn::{HostTensor, Isa, StateDict, safetensors};

const EPOCHS: usize = 4;

struct Golden {
    tensors: StateDict,
    metadata: BTreeMap<String, String>,
}

impl Golden {
    fn read() -> Self {
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden/ppo.safetensors");
        let (tensors, metadata) = safetensors::load(&PathBuf::from(root)).unwrap();
        Self { tensors, metadata: metadata.into_iter().collect() }
    }

    fn number(&self, key: &str) -> f64 {
        serde_json::from_str(&self.metadata[key]).unwrap()
    }

    fn float(&self, key: &str) -> f32 {
        self.number(key) as f32
    }

    fn size(&self, key: &str) -> usize {
        self.number(key) as usize
    }

    fn values(&self, name: &str) -> &[f32] {
        self.tensors.get(name).unwrap_or_else(|| panic!("no {name}")).as_f32().unwrap()
    }

    /// The tensors under a prefix, without the prefix in their names.
    fn of(&self, prefix: &str) -> StateDict {
        let named = |(n, t): (&str, &HostTensor)| Some((n.strip_prefix(prefix)?.into(), t.clone()));
        StateDict(self.tensors.iter().filter_map(named).collect())
    }

    /// Panics unless every value is within the tolerance. `torch` is PyTorch's own error for this
    /// tensor.
    fn close(&self, isa: Isa, name: &str, got: &[f32]) {
        let errors: BTreeMap<String, f64> =
            serde_json::from_str(&self.metadata["torch_error"]).unwrap();
        let expected = self.values(name);
        assert_eq!(got.len(), expected.len(), "{name}");
        let largest = expected.iter().fold(0f64, |m, v| m.max(f64::from(*v).abs()));
        let limit = largest * (1e-4 + errors[name]) + 1e-9;
        for (i, (g, e)) in got.iter().zip(expected).enumerate() {
            let apart = (f64::from(*g) - f64::from(*e)).abs();
            let text = format!("{apart:.2e} over {limit:.2e}");
            assert!(apart <= limit, "{name}[{i}] ({isa}): {g}, PyTorch {e}, {text}");
        }
    }

    fn shape(&self) -> PolicyShape {
        PolicyShape {
            form: PolicyForm::Vector,
            features: self.size("features"),
            slots: self.size("slots"),
            blueprints: self.size("blueprints"),
            hidden: self.size("hidden"),
        }
    }

    fn policy(&self, stream: &Stream, isa: Isa) -> Policy {
        let adam = AdamConfig {
            lr: self.float("lr"),
            betas: [0.9, 0.999],
            eps: self.float("eps"),
            weight_decay: 0.0,
            clip_norm: self.float("clip_norm"),
        };
        let loss = LossConfig {
            clip: self.float("clip"),
            value: self.float("value"),
            entropy: self.float("entropy"),
            entropy_floor: self.float("entropy_floor"),
            entropy_floor_penalty: self.float("entropy_floor_penalty"),
            floors: [0.15, 0.05, 0.12, 0.08, 0.12, 0.08, 0.06, 0.06],
        };
        let config = PolicyConfig { adam, ..PolicyConfig::new(1) };
        let mut policy = Policy::new(stream, self.shape(), &config, &loss, isa).unwrap();
        policy.load_state_dict(&self.of("init/")).unwrap();
        policy
    }

    /// A tensor of the round, `[rows, …]`, with elements of type `T`.
    fn batch<T: Element>(&self, stream: &Stream, name: &str, of: fn(f32) -> T) -> Tensor {
        let tensor = self.tensors.get(&format!("batch/{name}")).unwrap();
        let values: Vec<T> = tensor.as_f32().unwrap().iter().map(|v| of(*v)).collect();
        let rows: usize = tensor.shape[..2].iter().product();
        let mut shape = vec![rows];
        shape.extend(&tensor.shape[2..]);
        if name == "state" {
            shape = tensor.shape.clone();
        }
        Tensor::from_slice(stream, &values, &shape[..], Owner::Policy).unwrap()
    }
}

fn check_report(golden: &Golden, isa: Isa, epoch: usize, (report, norm): (&PpoReport, f64)) {
    let check = |name: &str, values: &[f64]| {
        let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
        golden.close(isa, &format!("epoch{epoch}/{name}"), &values);
    };
    check("loss", &[report.loss]);
    check("policy_loss", &[report.policy_loss]);
    check("value_loss", &[report.value_loss]);
    check("entropy_loss", &[report.entropy_loss]);
    check("kl", &[report.kl]);
    check("norm", &[norm]);
    check("entropy", &report.heads.iter().map(|h| h.entropy).collect::<Vec<_>>());
    check("clipped", &report.heads.iter().map(|h| h.clipped).collect::<Vec<_>>());
}

#[test]
fn four_epochs() {
    let golden = Golden::read();
    assert_eq!(golden.size("epochs"), EPOCHS);
    for isa in Isa::available() {
        let device = Device::open(DeviceId::Cpu(0), &DeviceOptions::default()).unwrap();
        let stream = device.stream("policy");
        let mut policy = golden.policy(&stream, isa);
        let float = |name: &str| golden.batch(&stream, name, |v| v);
        let whole = |name: &str| golden.batch(&stream, name, |v| v as u32);
        let (observations, keep, state) = (float("observations"), float("keep"), float("state"));
        let (blueprints, choices) = (whole("blueprints"), whole("choices"));
        let legal = golden.batch(&stream, "legal", |v| v as u8);
        let (advantages, returns) = (float("advantages"), float("returns"));
        let inputs = PolicyInputs { rows: vec![&observations, &blueprints, &keep], state: &state };
        let batch = PolicyBatch {
            steps: golden.size("steps"),
            inputs,
            choices: &choices,
            legal: &legal,
            advantages: &advantages,
            returns: &returns,
        };
        for epoch in 0..EPOCHS {
            let pass = if epoch == 0 { PpoPass::First } else { PpoPass::Later };
            policy.differentiate(&batch, pass).unwrap();
            let (report, norm) = policy.report().unwrap();
            check_report(&golden, isa, epoch, (&report, norm));
            let gradients = policy.gradient_dict().unwrap();
            for (name, gradient) in gradients.iter() {
                let key = format!("epoch{epoch}/grad.{name}");
                golden.close(isa, &key, gradient.as_f32().unwrap());
            }
            policy.apply().unwrap();
        }
        let weights = policy.state_dict().unwrap();
        assert_eq!(weights.len(), golden.of("final/").len());
        for (name, weight) in weights.iter() {
            golden.close(isa, &format!("final/{name}"), weight.as_f32().unwrap());
        }
    }
}
