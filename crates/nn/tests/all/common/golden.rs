//! Reading `golden/*.safetensors` (see `reference/README.md` for the names in them).

use std::collections::BTreeMap;
use std::path::PathBuf;

use safetensors::{Dtype, SafeTensors};
use serde_json::Value;

/// A tensor of a golden file, converted to f32 (labels and images are small whole numbers).
#[derive(Clone, Debug)]
pub(crate) struct Golden {
    pub(crate) shape: Vec<usize>,
    pub(crate) values: Vec<f32>,
}

/// A golden file.
pub(crate) struct File {
    pub(crate) tensors: BTreeMap<String, Golden>,
    pub(crate) metadata: BTreeMap<String, String>,
}

/// Path of a golden file.
pub(crate) fn path(name: &str) -> PathBuf {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../../golden");
    PathBuf::from(root).join(format!("{name}.safetensors"))
}

/// Reads `golden/{name}.safetensors`.
pub(crate) fn read(name: &str) -> File {
    let bytes = std::fs::read(path(name)).unwrap();
    let (_, header) = SafeTensors::read_metadata(&bytes).unwrap();
    let metadata = header.metadata().clone().unwrap().into_iter().collect();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let convert = |view: &safetensors::tensor::TensorView<'_>| -> Vec<f32> {
        let data = view.data();
        match view.dtype() {
            Dtype::F32 => {
                data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
            }
            Dtype::I64 => data
                .chunks_exact(8)
                .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as f32)
                .collect(),
            Dtype::U8 => data.iter().map(|b| f32::from(*b)).collect(),
            other => panic!("{other:?} in {name}"),
        }
    };
    let tensors = tensors
        .iter()
        .map(|(name, view)| {
            let golden = Golden { shape: view.shape().to_vec(), values: convert(&view) };
            (name.to_owned(), golden)
        })
        .collect();
    File { tensors, metadata }
}

impl File {
    /// The cases of the file.
    pub(crate) fn cases(&self) -> Vec<Value> {
        serde_json::from_str(&self.metadata["cases"]).unwrap()
    }

    /// The tensors `<case>/<kind>.<name>`, by name.
    pub(crate) fn tensors(&self, case: &str, kind: &str) -> BTreeMap<String, Golden> {
        let prefix = format!("{case}/{kind}.");
        let named =
            |(k, v): (&String, &Golden)| Some((k.strip_prefix(&prefix)?.to_owned(), v.clone()));
        self.tensors.iter().filter_map(named).collect()
    }
}
