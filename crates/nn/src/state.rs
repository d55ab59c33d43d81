//! Weights in host memory under PyTorch's names and shapes (U5).

use std::collections::BTreeMap;
use std::fmt;

/// Elements of a [`HostTensor`].
#[derive(Clone, Debug, PartialEq)]
pub enum HostData {
    /// 32-bit floats.
    F32(Vec<f32>),
    /// 64-bit integers (`num_batches_tracked`).
    I64(Vec<i64>),
    /// Bytes: no weights, but other contents of a checkpoint.
    U8(Vec<u8>),
}

impl HostData {
    /// Number of elements.
    pub fn len(&self) -> usize {
        match self {
            HostData::F32(v) => v.len(),
            HostData::I64(v) => v.len(),
            HostData::U8(v) => v.len(),
        }
    }

    /// Passes the bytes of the elements to a closure, in order, little-endian, in one piece or
    /// several.
    pub fn le_bytes(&self, mut each: impl FnMut(&[u8])) {
        match self {
            HostData::F32(v) => v.iter().for_each(|x| each(&x.to_le_bytes())),
            HostData::I64(v) => v.iter().for_each(|x| each(&x.to_le_bytes())),
            HostData::U8(v) => each(v),
        }
    }

    /// `f32`, `i64` or `u8`.
    pub(crate) fn dtype_name(&self) -> &'static str {
        match self {
            HostData::F32(_) => "f32",
            HostData::I64(_) => "i64",
            HostData::U8(_) => "u8",
        }
    }

    /// Whether there are no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A tensor in host memory, row-major.
#[derive(Clone, Debug, PartialEq)]
pub struct HostTensor {
    /// PyTorch's shape; empty for a scalar.
    pub shape: Vec<usize>,
    /// The elements; their number is the product of the shape.
    pub data: HostData,
}

impl HostTensor {
    /// A tensor of floats.
    pub fn f32(shape: &[usize], values: Vec<f32>) -> Self {
        Self { shape: shape.to_vec(), data: HostData::F32(values) }
    }

    /// A 0-dimensional integer.
    pub fn scalar_i64(value: i64) -> Self {
        Self { shape: vec![], data: HostData::I64(vec![value]) }
    }

    /// A vector of bytes.
    pub fn bytes(bytes: Vec<u8>) -> Self {
        Self { shape: vec![bytes.len()], data: HostData::U8(bytes) }
    }

    /// The floats; `None` for integers and bytes.
    pub fn as_f32(&self) -> Option<&[f32]> {
        match &self.data {
            HostData::F32(v) => Some(v),
            HostData::I64(_) | HostData::U8(_) => None,
        }
    }

    /// Element type and shape, for messages: `f32 [8, 3, 3, 3]`.
    pub fn form(&self) -> String {
        format!("{} {:?}", self.data.dtype_name(), self.shape)
    }

    /// Whether the number of elements is the product of the shape.
    pub fn is_whole(&self) -> bool {
        let numel = self.shape.iter().try_fold(1usize, |n, d| n.checked_mul(*d));
        numel == Some(self.data.len())
    }
}

/// Prefixes of PyTorch's wrappers.
const WRAPPERS: [&str; 2] = ["module.", "_orig_mod."];

/// Named tensors, as PyTorch's `state_dict`; sorted by name.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StateDict(pub BTreeMap<String, HostTensor>);

impl StateDict {
    /// The tensor of this name.
    pub fn get(&self, name: &str) -> Option<&HostTensor> {
        self.0.get(name)
    }

    /// Adds or replaces a tensor.
    pub fn insert(&mut self, name: impl Into<String>, tensor: HostTensor) {
        self.0.insert(name.into(), tensor);
    }

    /// Names and tensors, sorted by name.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &HostTensor)> {
        self.0.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// Removes the prefix that PyTorch's wrappers put before every name: `module.` by
    /// `DistributedDataParallel`, `_orig_mod.` by `torch.compile`, or several of them. Returns the
    /// prefix. Removes nothing and returns `None` if some name lacks it or consists of it alone.
    pub fn unwrap_names(&mut self) -> Option<String> {
        let mut prefix = String::new();
        let first = self.0.keys().next()?;
        while let Some(wrapper) = WRAPPERS.iter().find(|w| first[prefix.len()..].starts_with(**w)) {
            prefix.push_str(wrapper);
        }
        let named = |name: &String| name.len() > prefix.len() && name.starts_with(&prefix);
        if prefix.is_empty() || !self.0.keys().all(named) {
            return None;
        }
        let tensors = std::mem::take(&mut self.0).into_iter();
        self.0 = tensors.map(|(name, tensor)| (name[prefix.len()..].into(), tensor)).collect();
        Some(prefix)
    }

    /// Number of tensors.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are no tensors.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Compares with the tensors of a network, name -> form (PyTorch shape, whether integers).
    ///
    /// # Errors
    /// Everything that does not fit: with `strict` also missing and surplus tensors.
    pub(crate) fn check(
        &self,
        expected: &BTreeMap<&str, (Vec<usize>, bool)>,
        strict: bool,
    ) -> Result<(), StateError> {
        let mut error = StateError::default();
        for (&name, (shape, integers)) in expected {
            let Some(tensor) = self.get(name) else {
                error.missing.push(name.into());
                continue;
            };
            let form = format!("{} {shape:?}", if *integers { "i64" } else { "f32" });
            if tensor.form() != form || !tensor.is_whole() {
                let got = if tensor.is_whole() {
                    tensor.form()
                } else {
                    format!("{} with {} elements", tensor.form(), tensor.data.len())
                };
                error.misshapen.push(format!("{name} (expected {form}, got {got})"));
            } else if tensor.as_f32().is_some_and(|v| v.iter().any(|v| !v.is_finite())) {
                error.non_finite.push(name.into());
            }
        }
        let extra = self.iter().filter(|(name, _)| !expected.contains_key(name));
        error.extra = extra.map(|(name, _)| name.into()).collect();
        if !strict {
            error.missing.clear();
            error.extra.clear();
        }
        if error == StateError::default() { Ok(()) } else { Err(error) }
    }
}

/// Every tensor of a [`StateDict`] that does not fit a network.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StateError {
    /// Tensors of the network that the weights lack.
    pub missing: Vec<String>,
    /// Tensors of the weights that the network lacks.
    pub extra: Vec<String>,
    /// Tensors of another shape or element type; with the expected and the given form.
    pub misshapen: Vec<String>,
    /// NaN or infinity among the elements.
    pub non_finite: Vec<String>,
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(
            "the weights do not fit the network; use weights of the same host and topology",
        )?;
        let lists = [
            ("missing", &self.missing),
            ("not in the network", &self.extra),
            ("of another form", &self.misshapen),
            ("with NaN or infinity", &self.non_finite),
        ];
        for (what, names) in lists.into_iter().filter(|(_, names)| !names.is_empty()) {
            write!(f, "\n  {what} ({}): {}", names.len(), names.join(", "))?;
        }
        Ok(())
    }
}

impl std::error::Error for StateError {}

/// Bytes as elements, wherever they start in memory.
pub(crate) fn elements<T: bytemuck::AnyBitPattern>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_of_a_wrapper_is_removed_if_all_names_have_it() {
        let named = |names: &[&str]| {
            let mut state = StateDict::default();
            names.iter().for_each(|name| state.insert(*name, HostTensor::scalar_i64(1)));
            state
        };
        for (names, prefix) in [
            (["module.a.weight", "module.b"], Some("module.")),
            (["_orig_mod.a.weight", "_orig_mod.b"], Some("_orig_mod.")),
            (["module._orig_mod.a.weight", "module._orig_mod.b"], Some("module._orig_mod.")),
            (["a.weight", "module.b"], None),
            (["module.", "module.b"], None),
            (["modules.a.weight", "modules.b"], None),
        ] {
            let mut state = named(&names);
            assert_eq!(state.unwrap_names().as_deref(), prefix, "{names:?}");
            let expected = if prefix.is_some() { ["a.weight", "b"] } else { names };
            assert_eq!(state, named(&expected));
        }
        assert_eq!(StateDict::default().unwrap_names(), None);
    }

    #[test]
    fn everything_wrong_is_listed_at_once() {
        let mut state = StateDict::default();
        state.insert("ok", HostTensor::f32(&[2], vec![1.0, 2.0]));
        state.insert("nan", HostTensor::f32(&[], vec![f32::NAN]));
        state.insert("shape", HostTensor::f32(&[3, 1], vec![0.0; 3]));
        state.insert("type", HostTensor::f32(&[], vec![0.0]));
        state.insert("short", HostTensor::f32(&[4], vec![0.0]));
        state.insert("left", HostTensor::scalar_i64(1));
        let expected = BTreeMap::from([
            ("ok", (vec![2], false)),
            ("nan", (vec![], false)),
            ("shape", (vec![3], false)),
            ("type", (vec![], true)),
            ("short", (vec![4], false)),
            ("gone", (vec![1], false)),
        ]);
        let error = state.check(&expected, true).unwrap_err();
        assert_eq!(
            (&error.missing[..], &error.extra[..]),
            (&["gone".into()][..], &["left".into()][..])
        );
        assert_eq!(error.non_finite, ["nan"]);
        assert_eq!(
            error.misshapen,
            [
                "shape (expected f32 [3], got f32 [3, 1])",
                "short (expected f32 [4], got f32 [4] with 1 elements)",
                "type (expected i64 [], got f32 [])",
            ]
        );
        let text = error.to_string();
        assert!(
            text.contains("missing (1): gone") && text.contains("with NaN or infinity (1): nan")
        );
        let loose = state.check(&expected, false).unwrap_err();
        assert!(loose.missing.is_empty() && loose.extra.is_empty() && loose.misshapen.len() == 3);
    }
}
