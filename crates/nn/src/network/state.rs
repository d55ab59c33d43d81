//! Weights and optimiser state in and out of a network, under PyTorch's names (U5).

use std::collections::BTreeMap;

use meristem_device::{Element, Tensor, read_back, read_back_as};

use super::{Group, Network};
use crate::error::Result;
use crate::layout::{Layout, packing};
use crate::state::{HostData, HostTensor, StateDict, elements};

impl Network {
    /// Parameters and buffers. One read-back, which waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub fn state_dict(&self) -> Result<StateDict> {
        let layout = Layout::new(&self.graph);
        let mut tensors = vec![];
        for g in &self.groups {
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

    /// The momentum of every parameter, under the parameter's name and in its shape: what the
    /// optimiser remembers. One read-back, which waits for the device.
    ///
    /// # Errors
    /// A failed stream.
    pub fn momentum_dict(&self) -> Result<StateDict> {
        let layout = Layout::new(&self.graph);
        let tensors: Vec<_> = self.groups.iter().map(|g| &g.momentum).collect();
        let momentum = read_back_as::<f32>(&tensors)?;
        Ok(self.parameters(&layout, &momentum))
    }

    /// Packed tensors, one per group, under the parameters' names.
    fn parameters(&self, layout: &Layout, groups: &[Vec<f32>]) -> StateDict {
        let mut state = StateDict::default();
        for (param, place) in self.graph.params.iter().zip(&layout.params) {
            let packed = &groups[place.group.index()];
            let mut values = vec![0.0; param.shape.iter().product()];
            packing(param).unpack(&packed[place.range()], &mut values);
            state.insert(&*param.name, HostTensor::f32(&param.shape, values));
        }
        state
    }

    /// Sets parameters and buffers; momentum stays as it is. All or nothing. Without `strict`,
    /// names that only one side has are passed over. Does not wait for the device.
    ///
    /// # Errors
    /// [`StateError`](crate::StateError) lists every tensor that is missing, left over, of another
    /// form, or holds NaN or infinity.
    pub fn load_state_dict(&mut self, state: &StateDict, strict: bool) -> Result<()> {
        let mut expected = self.parameter_forms();
        for buffer in &self.graph.buffers {
            let shape = if buffer.counter { vec![] } else { vec![buffer.len] };
            expected.insert(&buffer.name, (shape, buffer.counter));
        }
        state.check(&expected, strict)?;
        let layout = Layout::new(&self.graph);
        self.load_parameters(state, &layout, |group| &group.values)?;
        for (buffer, place) in self.graph.buffers.iter().zip(&layout.buffers) {
            let group = &self.groups[place.group.index()];
            match state.get(&buffer.name).map(|t| &t.data) {
                Some(HostData::F32(v)) => copy_into(&group.state, place.start, v)?,
                Some(HostData::I64(v)) => copy_into(&group.counters, place.start, v)?,
                None => {}
            }
        }
        Ok(())
    }

    /// Sets the momentum of every parameter, as [`Network::momentum_dict`] gave it. Does not wait.
    ///
    /// # Errors
    /// As [`Network::load_state_dict`], strict.
    pub fn load_momentum_dict(&mut self, state: &StateDict) -> Result<()> {
        state.check(&self.parameter_forms(), true)?;
        let layout = Layout::new(&self.graph);
        self.load_parameters(state, &layout, |group| &group.momentum)
    }

    /// Sets all momentum to zero: the optimiser starts anew. Does not wait.
    ///
    /// # Errors
    /// A failed stream.
    pub fn clear_momentum(&mut self) -> Result<()> {
        for group in &self.groups {
            let launch = self.stream.launch("clear_momentum").write(&group.momentum);
            launch.run(|args| args.write::<f32>(0).fill(0.0))?;
        }
        Ok(())
    }

    fn parameter_forms(&self) -> BTreeMap<&str, (Vec<usize>, bool)> {
        self.graph.params.iter().map(|p| (&*p.name, (p.shape.clone(), false))).collect()
    }

    fn load_parameters(
        &self,
        state: &StateDict,
        layout: &Layout,
        tensor: impl Fn(&Group) -> &Tensor,
    ) -> Result<()> {
        for (param, place) in self.graph.params.iter().zip(&layout.params) {
            if let Some(values) = state.get(&param.name).and_then(HostTensor::as_f32) {
                let mut packed = vec![0.0; place.len];
                packing(param).pack(values, &mut packed);
                copy_into(tensor(&self.groups[place.group.index()]), place.start, &packed)?;
            }
        }
        Ok(())
    }
}

fn copy_into<T: Element>(tensor: &Tensor, start: usize, values: &[T]) -> Result<()> {
    Ok(tensor.view(start, [values.len()])?.copy_from_slice(values)?)
}
