//! Inputs of a policy step, uploaded in one copy: observations, legality, and the key of the random
//! numbers.

use meristem_device::{DType, Owner, Result, Stream, Tensor};
use meristem_nn::kernels::sample::SampleStep;

use super::rollout::RolloutShape;
use crate::masks::Legality;
use crate::observation::write_observation;
use crate::view::EnvView;

/// Host memory of the inputs, and device memory with a view of each input.
#[derive(Debug)]
pub(super) struct StepInputs {
    shape: RolloutShape,
    words: Vec<u32>,
    /// u32 `[words]`.
    whole: Tensor,
    /// f32 `[envs, features]`, normalised.
    pub(super) observations: Tensor,
    /// u32 `[envs, slots]`.
    pub(super) blueprints: Tensor,
    /// f32 `[envs]`: 0 where a trajectory begins, else 1.
    pub(super) keep: Tensor,
    /// u32 `[envs, slots · words]`: [`Legality::write_places`].
    pub(super) legality: Tensor,
    /// u32 `[4]`: [`SampleStep`].
    pub(super) step: Tensor,
}

impl StepInputs {
    /// Allocates the memory, with `words` words of legality per slot. Does not wait.
    pub(super) fn new(stream: &Stream, shape: RolloutShape, words: usize) -> Result<Self> {
        let RolloutShape { envs, features, slots, .. } = shape;
        let places = slots * words;
        let len = envs * (features + slots + 1 + places) + SampleStep::WORDS;
        let whole = Tensor::zeros(stream, [len], DType::U32, Owner::Policy)?;
        let mut first = 0;
        let mut part = |dims: &[usize], dtype| {
            let view = whole.view(first, dims)?.reinterpret(dtype);
            first += dims.iter().product::<usize>();
            view
        };
        Ok(Self {
            shape,
            words: vec![0; len],
            observations: part(&[envs, features], DType::F32)?,
            blueprints: part(&[envs, slots], DType::U32)?,
            keep: part(&[envs], DType::F32)?,
            legality: part(&[envs, places], DType::U32)?,
            step: part(&[SampleStep::WORDS], DType::U32)?,
            whole,
        })
    }

    /// Uploads the observations, normalised by `normalize`, and the legality of all envs. `fresh`:
    /// the env begins a trajectory. One copy to the device; does not wait.
    pub(super) fn send(
        &mut self,
        views: &[EnvView<'_>],
        fresh: &[bool],
        mut normalize: impl FnMut(&mut [f32]),
        step: SampleStep,
    ) -> Result<()> {
        let RolloutShape { envs, features, slots, .. } = self.shape;
        let (observations, rest) = self.words.split_at_mut(envs * features);
        let (blueprints, rest) = rest.split_at_mut(envs * slots);
        let (keep, rest) = rest.split_at_mut(envs);
        let (legality, key) = rest.split_at_mut(self.legality.numel());
        let rows = bytemuck::cast_slice_mut::<u32, f32>(observations).chunks_exact_mut(features);
        let rows = rows.zip(blueprints.chunks_exact_mut(slots));
        for (view, (row, blueprints)) in views.iter().zip(rows) {
            write_observation(view, row, blueprints);
            normalize(row);
        }
        for (view, places) in
            views.iter().zip(legality.chunks_exact_mut(self.legality.numel() / envs))
        {
            Legality::from_host(view.host).write_places(places);
        }
        let goes_on = |fresh: &bool| if *fresh { 0.0f32 } else { 1.0 };
        keep.iter_mut().zip(fresh).for_each(|(to, fresh)| *to = goes_on(fresh).to_bits());
        key.copy_from_slice(&step.to_words());
        self.whole.copy_from_slice(&self.words)
    }
}
