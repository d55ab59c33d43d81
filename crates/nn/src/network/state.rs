//! Weights and optimiser state in and out of a network, under PyTorch's names (U5).

use std::collections::BTreeMap;

use meristem_device::{Element, Fill, Tensor, read_back};

use super::{Group, Network};
use crate::error::Result;
use crate::graph::{Graph, Optimiser};
use crate::layout::{Layout, Place, packing};
use crate::state::{HostData, HostTensor, StateDict, elements};

impl Network {
    /// Parameters and buffers. One read-back, which waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn state_dict(&self) -> Result<StateDict> {
        self.weights().state_dict()
    }

    /// What the optimiser remembers: the momentum of every parameter, under the parameter's name
    /// and in its shape. Of a group with Adam instead `{parameter}.exp_avg` and
    /// `{parameter}.exp_avg_sq`, and its steps as `{group}.step`. One read-back, which waits for
    /// the device.
    ///
    /// # Errors
    /// A failed stream.
    #[track_caller]
    pub fn momentum_dict(&self) -> Result<StateDict> {
        self.weights().moments_dict()
    }

    /// Sets parameters and buffers; momentum stays as it is. All or nothing. Without `strict`,
    /// names that only one side has are passed over. Does not wait for the device.
    ///
    /// # Errors
    /// [`StateError`](crate::StateError) lists every tensor that is missing, left over, of another
    /// form, or holds NaN or infinity.
    pub fn load_state_dict(&mut self, state: &StateDict, strict: bool) -> Result<()> {
        self.weights().load_state_dict(state, strict)
    }

    /// Sets what the optimiser remembers, as [`Network::momentum_dict`] gave it. Does not wait.
    ///
    /// # Errors
    /// As [`Network::load_state_dict`], strict.
    pub fn load_momentum_dict(&mut self, state: &StateDict) -> Result<()> {
        self.weights().load_moments_dict(state)
    }

    /// Sets all momentum (and Adam's averages and steps) to zero: the optimiser starts anew. Does
    /// not wait.
    ///
    /// # Errors
    /// A failed stream.
    pub fn clear_momentum(&mut self) -> Result<()> {
        self.weights().clear_moments()
    }

    fn weights(&self) -> Weights<'_> {
        Weights { graph: self.graph(), groups: &self.groups }
    }
}

/// A graph with the tensors of its groups.
pub(super) struct Weights<'a> {
    pub(super) graph: &'a Graph,
    pub(super) groups: &'a [Group],
}

/// A part of the state of a parameter: its suffix, and which number the optimiser keeps.
const ADAM: [(&str, usize); 2] = [(".exp_avg", 0), (".exp_avg_sq", 1)];
const MOMENTUM: [(&str, usize); 1] = [("", 0)];

impl Weights<'_> {
    /// Parameters and buffers.
    #[track_caller]
    pub(super) fn state_dict(&self) -> Result<StateDict> {
        let layout = Layout::new(self.graph);
        let mut tensors = vec![];
        for g in self.groups {
            tensors.extend([&g.values, &g.state, &g.counters]);
        }
        let raw = read_back(&tensors)?;
        let floats = |which: usize| -> Vec<Vec<f32>> {
            raw.iter().skip(which).step_by(3).map(|bytes| elements(bytes)).collect()
        };
        let (values, statistics) = (floats(0), floats(1));
        let counters: Vec<Vec<i64>> =
            raw.iter().skip(2).step_by(3).map(|bytes| elements(bytes)).collect();
        let mut state = self.parameters(&layout, &values);
        for (buffer, place) in self.graph.buffers.iter().zip(&layout.buffers) {
            let group = place.group.index();
            let tensor = match buffer.counter {
                true => HostTensor::scalar_i64(counters[group][place.start]),
                false => HostTensor::f32(&[buffer.len], statistics[group][place.range()].to_vec()),
            };
            state.insert(&*buffer.name, tensor);
        }
        Ok(state)
    }

    /// Packed tensors, one per group, under the parameters' names.
    pub(super) fn parameters(&self, layout: &Layout, groups: &[Vec<f32>]) -> StateDict {
        let mut state = StateDict::default();
        for (param, place) in self.graph.params.iter().zip(&layout.params) {
            let packed = &groups[place.group.index()];
            let mut values = vec![0.0; param.shape.iter().product()];
            packing(param).unpack(&packed[place.range()], &mut values);
            state.insert(&*param.name, HostTensor::f32(&param.shape, values));
        }
        state
    }

    /// What the optimiser remembers of the parameters of a group.
    fn parts(&self, group: usize) -> &'static [(&'static str, usize)] {
        match self.graph.groups[group].optimiser {
            Optimiser::Sgd(_) => &MOMENTUM,
            Optimiser::Adam(_) => &ADAM,
        }
    }

    /// What the optimiser remembers.
    #[track_caller]
    pub(super) fn moments_dict(&self) -> Result<StateDict> {
        let layout = Layout::new(self.graph);
        let tensors: Vec<_> = self.groups.iter().flat_map(|g| [&g.momentum, &g.counters]).collect();
        let raw = read_back(&tensors)?;
        let moments: Vec<Vec<f32>> = raw.iter().step_by(2).map(|bytes| elements(bytes)).collect();
        let mut state = StateDict::default();
        for (param, place) in self.graph.params.iter().zip(&layout.params) {
            let group = place.group.index();
            for (suffix, part) in self.parts(group) {
                let start = part * layout.groups[group].values + place.start;
                let mut values = vec![0.0; param.shape.iter().product()];
                packing(param).unpack(&moments[group][start..start + place.len], &mut values);
                let tensor = HostTensor::f32(&param.shape, values);
                state.insert(format!("{}{suffix}", param.name), tensor);
            }
        }
        for (group, step) in layout.steps.iter().enumerate() {
            if let Some(step) = step {
                let counters: Vec<i64> = elements(&raw[2 * group + 1]);
                state.insert(self.step_name(group), HostTensor::scalar_i64(counters[*step]));
            }
        }
        Ok(state)
    }

    fn step_name(&self, group: usize) -> String {
        format!("{}.step", self.graph.groups[group].name)
    }

    /// Sets parameters and buffers.
    pub(super) fn load_state_dict(&self, state: &StateDict, strict: bool) -> Result<()> {
        let mut expected: BTreeMap<&str, (Vec<usize>, bool)> =
            self.graph.params.iter().map(|p| (&*p.name, (p.shape.clone(), false))).collect();
        for buffer in &self.graph.buffers {
            let shape = if buffer.counter { vec![] } else { vec![buffer.len] };
            expected.insert(&buffer.name, (shape, buffer.counter));
        }
        state.check(&expected, strict)?;
        let layout = Layout::new(self.graph);
        for (param, place) in self.graph.params.iter().zip(&layout.params) {
            let values = &self.groups[place.group.index()].values;
            load_packed(state, &param.name, packing(param), (values, *place))?;
        }
        for (buffer, place) in self.graph.buffers.iter().zip(&layout.buffers) {
            let group = &self.groups[place.group.index()];
            match state.get(&buffer.name).map(|t| &t.data) {
                Some(HostData::F32(v)) => copy_into(&group.state, place.start, v)?,
                Some(HostData::I64(v)) => copy_into(&group.counters, place.start, v)?,
                Some(HostData::U8(_)) | None => {}
            }
        }
        Ok(())
    }

    /// Sets what the optimiser remembers.
    pub(super) fn load_moments_dict(&self, state: &StateDict) -> Result<()> {
        let layout = Layout::new(self.graph);
        let mut names = vec![];
        for (param, place) in self.graph.params.iter().zip(&layout.params) {
            let group = place.group.index();
            for (suffix, part) in self.parts(group) {
                let start = part * layout.groups[group].values + place.start;
                names.push((format!("{}{suffix}", param.name), param, Place { start, ..*place }));
            }
        }
        let steps: Vec<(String, usize, usize)> = layout
            .steps
            .iter()
            .enumerate()
            .filter_map(|(g, step)| Some((self.step_name(g), g, (*step)?)))
            .collect();
        let mut expected: BTreeMap<&str, (Vec<usize>, bool)> =
            names.iter().map(|(name, p, _)| (&**name, (p.shape.clone(), false))).collect();
        expected.extend(steps.iter().map(|(name, ..)| (&**name, (vec![], true))));
        state.check(&expected, true)?;
        for (name, param, place) in &names {
            let moments = &self.groups[place.group.index()].momentum;
            load_packed(state, name, packing(param), (moments, *place))?;
        }
        for (name, group, step) in &steps {
            if let Some(HostData::I64(v)) = state.get(name).map(|t| &t.data) {
                copy_into(&self.groups[*group].counters, *step, v)?;
            }
        }
        Ok(())
    }

    /// Sets what the optimiser remembers to zero.
    pub(super) fn clear_moments(&self) -> Result<()> {
        let layout = Layout::new(self.graph);
        let mut tensors = vec![];
        for (group, step) in self.groups.iter().zip(layout.steps) {
            tensors.push(group.momentum.clone());
            tensors.extend(step.map(|step| group.counters.view(step, [1])).transpose()?);
        }
        tensors.retain(|tensor| tensor.numel() > 0);
        match (self.groups.first(), tensors.is_empty()) {
            (Some(first), false) => {
                let all: Vec<&Tensor> = tensors.iter().collect();
                Ok(first.values.stream().fill("clear_momentum", &all, Fill::Zero)?)
            }
            _ => Ok(()),
        }
    }
}

/// Packs the tensor of this name, if there is one, into its place.
fn load_packed(
    state: &StateDict,
    name: &str,
    packing: crate::layout::Packing,
    (tensor, place): (&Tensor, Place),
) -> Result<()> {
    let Some(values) = state.get(name).and_then(HostTensor::as_f32) else { return Ok(()) };
    let mut packed = vec![0.0; place.len];
    packing.pack(values, &mut packed);
    copy_into(tensor, place.start, &packed)
}

fn copy_into<T: Element>(tensor: &Tensor, start: usize, values: &[T]) -> Result<()> {
    Ok(tensor.view(start, [values.len()])?.copy_from_slice(values)?)
}
