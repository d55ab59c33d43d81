//! Weights and optimiser state in and out of a network, under PyTorch's names (U5).

use std::borrow::Cow;
use std::collections::HashMap;

use meristem_device::{Fill, Tensor, read_back};

use super::{GroupTensors, Network};
use crate::error::Result;
use crate::graph::{Graph, GroupId, ParamKind, ParamSpec};
use crate::layout::{Packing, ParamLayout, packing};
use crate::state::{HostData, HostTensor, StateDict, elements};

/// Name of the host's count of batches for dropout. The name of a module's count is
/// `{group}.dropout.batches`.
const DROPOUT_BATCHES: &str = "dropout.batches";

impl Network {
    /// Parameters and buffers. One read-back, which waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn state_dict(&self) -> Result<StateDict> {
        self.weights().parameters()?.read_back()
    }

    /// State of the optimisers, in the shapes of the parameters. One read-back, which waits for the
    /// device.
    ///
    /// | optimiser | names |
    /// |---|---|
    /// | SGD, with Nesterov's momentum or without | `{parameter}` |
    /// | Adam, AdamW, and Muon's other parameters | `{parameter}.exp_avg`, `.exp_avg_sq`, `.step` |
    /// | Lion | `{parameter}.exp_avg` |
    /// | matrices of Muon | `{parameter}.momentum_buffer` |
    ///
    /// A network with dropout also has its count of batches, `dropout.batches`, and for a module
    /// with dropout `{group}.dropout.batches`.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn momentum_dict(&self) -> Result<StateDict> {
        self.weights().moments()?.read_back()
    }

    /// Sets parameters and buffers; momentum stays as it is. All or nothing. Without `strict`,
    /// names that only one side has are ignored. Does not wait for a CPU device; each tensor is
    /// copied, and waits for a CUDA device, as [`Tensor::copy_from_slice`] does.
    ///
    /// # Errors
    /// [`StateError`](crate::StateError) lists every tensor that is missing, surplus, of another
    /// form, or holds NaN or infinity.
    pub fn load_state_dict(&mut self, state: &StateDict, strict: bool) -> Result<()> {
        self.weights().parameters()?.load(state, strict)
    }

    /// Sets the optimiser's state to a result of [`Network::momentum_dict`]. Waits as
    /// [`Network::load_state_dict`]. A count of steps `{group}.step`, as earlier versions wrote it,
    /// is the count of every parameter of the group.
    ///
    /// # Errors
    /// As [`Network::load_state_dict`], strict.
    pub fn load_momentum_dict(&mut self, state: &StateDict) -> Result<()> {
        self.weights().load_moments(state)
    }

    /// Sets all momentum (and averages and counts of steps) to zero, which resets the optimiser.
    /// Dropout goes on counting batches, so that it draws no mask twice. Does not wait.
    ///
    /// # Errors
    /// A failed stream.
    pub fn clear_momentum(&mut self) -> Result<()> {
        self.weights().clear_moments()
    }

    pub(super) fn weights(&self) -> GraphWeights<'_> {
        GraphWeights { graph: self.graph(), groups: &self.groups }
    }
}

/// A graph with the tensors of its groups.
pub(super) struct GraphWeights<'a> {
    pub(super) graph: &'a Graph,
    pub(super) groups: &'a [GroupTensors],
}

/// Named tensors of a network, as views of its memory.
pub(super) struct NamedTensors(Vec<NamedTensor>);

/// A named tensor, with its view of a group's memory.
pub(super) struct NamedTensor {
    name: String,
    /// PyTorch's shape.
    shape: Vec<usize>,
    /// The form of f32 elements; `None` for an i64 counter.
    packing: Option<Packing>,
    memory: Tensor,
}

impl NamedTensor {
    fn packed(
        name: String,
        shape: &[usize],
        packing: Packing,
        at: (&Tensor, usize),
    ) -> Result<Self> {
        let (shape, memory) = (shape.to_vec(), at.0.view(at.1, [packing.len()])?);
        Ok(Self { name, shape, packing: Some(packing), memory })
    }

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn memory(&self) -> &Tensor {
        &self.memory
    }

    /// Whether both have one name, shape and form in memory.
    pub(super) fn is_like(&self, other: &Self) -> bool {
        (&self.name, &self.shape, self.packing) == (&other.name, &other.shape, other.packing)
    }

    fn counter(name: String, counters: &Tensor, at: usize) -> Result<Self> {
        Ok(Self { name, shape: vec![], packing: None, memory: counters.view(at, [1])? })
    }
}

impl GraphWeights<'_> {
    /// Parameters and buffers.
    pub(super) fn parameters(&self) -> Result<NamedTensors> {
        let layout = ParamLayout::new(self.graph);
        let params = self.graph.params.iter().zip(&layout.params).map(|(param, place)| {
            let values = &self.groups[place.group.index()].values;
            NamedTensor::packed(
                param.name.clone(),
                &param.shape,
                packing(param),
                (values, place.start),
            )
        });
        let buffers = self.graph.buffers.iter().zip(&layout.buffers).map(|(buffer, place)| {
            let (name, group) = (buffer.name.clone(), &self.groups[place.group.index()]);
            if buffer.counter {
                return NamedTensor::counter(name, &group.counters, place.start);
            }
            let shape = [buffer.len];
            let packing = Packing::new(ParamKind::Vector, &shape);
            NamedTensor::packed(name, &shape, packing, (&group.running_stats, place.start))
        });
        params.chain(buffers).collect::<Result<_>>().map(NamedTensors)
    }

    /// State of the optimisers.
    pub(super) fn moments(&self) -> Result<NamedTensors> {
        let layout = ParamLayout::new(self.graph);
        let mut entries = vec![];
        for (param, place) in self.graph.params.iter().zip(&layout.params) {
            let group = place.group.index();
            let kind = self.graph.groups[group].optimiser.kind();
            for (part, suffix) in kind.suffixes(param.kind).iter().enumerate() {
                let start = part * layout.groups[group].values + place.start;
                let at = (&self.groups[group].optimiser_state, start);
                let name = format!("{}{suffix}", param.name);
                entries.push(NamedTensor::packed(name, &param.shape, packing(param), at)?);
            }
        }
        let mut seen = vec![0; self.graph.groups.len()];
        for param in &self.graph.params {
            let group = param.group.index();
            let kind = self.graph.groups[group].optimiser.kind();
            let at = layout.step(param.group, seen[group]);
            seen[group] += 1;
            if let Some(at) = at.filter(|_| kind.counts_steps_of(param.kind)) {
                let (name, counters) = (step_name(&param.name), &self.groups[group].counters);
                entries.push(NamedTensor::counter(name, counters, at)?);
            }
        }
        for (g, at) in layout.dropout.iter().enumerate() {
            let Some(at) = *at else { continue };
            let name = if g == GroupId::HOST.index() {
                DROPOUT_BATCHES.into()
            } else {
                format!("{}.{DROPOUT_BATCHES}", self.graph.groups[g].name)
            };
            entries.push(NamedTensor::counter(name, &self.groups[g].counters, at)?);
        }
        Ok(NamedTensors(entries))
    }

    /// Sets the state of the optimisers, also of versions that counted the steps of a group.
    pub(super) fn load_moments(&self, state: &StateDict) -> Result<()> {
        self.moments()?.load(&with_steps_of_parameters(self.graph, state), true)
    }

    /// Sets the optimisers' state to zero, including the elements between the parameters, but not
    /// the count of batches for dropout.
    fn clear_moments(&self) -> Result<()> {
        let is_step =
            |entry: &NamedTensor| entry.packing.is_none() && !entry.name.ends_with(DROPOUT_BATCHES);
        let steps = self.moments()?.0.into_iter().filter(is_step);
        let momenta = self.groups.iter().map(|group| group.optimiser_state.clone());
        let mut all: Vec<Tensor> = momenta.chain(steps.map(|entry| entry.memory)).collect();
        all.retain(|tensor| tensor.numel() > 0);
        match all.first().map(Tensor::stream) {
            None => Ok(()),
            Some(stream) => {
                let all: Vec<&Tensor> = all.iter().collect();
                Ok(stream.fill("clear_momentum", &all, Fill::Zero)?)
            }
        }
    }
}

impl NamedTensors {
    pub(super) fn iter(&self) -> impl Iterator<Item = &NamedTensor> {
        self.0.iter()
    }

    /// All of them, on the host.
    #[track_caller]
    pub(super) fn read_back(&self) -> Result<StateDict> {
        let memory: Vec<_> = self.0.iter().map(|entry| &entry.memory).collect();
        let raw = read_back(&memory)?;
        let tensors =
            self.0.iter().zip(raw).map(|(NamedTensor { name, shape, packing, .. }, raw)| {
                let tensor = match packing {
                    Some(packing) => unpacked(shape, *packing, &elements(&raw)),
                    None => HostTensor::scalar_i64(elements(&raw)[0]),
                };
                (name.clone(), tensor)
            });
        Ok(StateDict(tensors.collect()))
    }

    /// Sets the tensors with these names to elements in PyTorch's order.
    pub(super) fn write(&self, values: &HashMap<String, Vec<f32>>) -> Result<()> {
        for NamedTensor { name, packing, memory, .. } in &self.0 {
            if let (Some(values), Some(packing)) = (values.get(name), packing) {
                memory.copy_from_slice(&packed(*packing, values))?;
            }
        }
        Ok(())
    }

    /// Sets all tensors, or none; without `strict` only the tensors that `state` has.
    pub(super) fn load(&self, state: &StateDict, strict: bool) -> Result<()> {
        let form = |entry: &NamedTensor| (entry.shape.clone(), entry.packing.is_none());
        let expected = self.0.iter().map(|entry| (&*entry.name, form(entry))).collect();
        state.check(&expected, strict)?;
        for NamedTensor { name, packing, memory, .. } in &self.0 {
            match (state.get(name).map(|tensor| &tensor.data), packing) {
                (Some(HostData::F32(values)), Some(packing)) => {
                    memory.copy_from_slice(&packed(*packing, values))?;
                }
                (Some(HostData::I64(values)), None) => memory.copy_from_slice(values)?,
                _ => {}
            }
        }
        Ok(())
    }
}

/// Name of a count of steps.
fn step_name(of: &str) -> String {
    format!("{of}.step")
}

/// The state with a count of steps for each parameter: earlier versions counted the steps of each
/// group.
fn with_steps_of_parameters<'a>(graph: &Graph, state: &'a StateDict) -> Cow<'a, StateDict> {
    let mut state = Cow::Borrowed(state);
    for (g, group) in graph.groups.iter().enumerate() {
        let (kind, name) = (group.optimiser.kind(), step_name(&group.name));
        let of_group = |param: &&ParamSpec| param.group.index() == g;
        let counted: Vec<_> = graph.params.iter().filter(of_group).collect();
        let is_name = |param: &&ParamSpec| step_name(&param.name) == name;
        if !kind.counts_steps() || counted.iter().any(is_name) {
            continue;
        }
        if let Some(steps) = state.get(&name).cloned() {
            let state = state.to_mut();
            state.0.remove(&name);
            for param in counted.iter().filter(|param| kind.counts_steps_of(param.kind)) {
                state.0.entry(step_name(&param.name)).or_insert_with(|| steps.clone());
            }
        }
    }
    state
}

/// Elements in PyTorch's order, packed.
fn packed(packing: Packing, values: &[f32]) -> Vec<f32> {
    let mut packed = vec![0.0; packing.len()];
    packing.pack(values, &mut packed);
    packed
}

/// A packed tensor in PyTorch's shape.
pub(super) fn unpacked(shape: &[usize], packing: Packing, packed: &[f32]) -> HostTensor {
    let mut values = vec![0.0; shape.iter().product()];
    packing.unpack(packed, &mut values);
    HostTensor::f32(shape, values)
}
