//! Inputs of a policy step, uploaded in one copy: observations, legality, and the key of the random
//! numbers.

use meristem_device::{DType, Owner, Result, Stream, Tensor};
use meristem_nn::kernels::sample::SampleStep;

use super::normalizers::Normalizers;
use crate::masks::Legality;
use crate::normalizer::Normalizer;
use crate::observation::write_observation;
use crate::policy::PolicyShape;
use crate::set_observation::{SetObserver, SetRow};
use crate::view::EnvView;

/// Host memory of the inputs, and device memory with a view of each input.
#[derive(Debug)]
pub(super) struct StepInputs {
    words: Vec<u32>,
    /// u32 `[words]`.
    whole: Tensor,
    /// [`PolicyShape::inputs`], `[envs, width]` each, or `[envs]` for a width of 1.
    pub(super) rows: Vec<Tensor>,
    /// u32 `[envs, slots · words]`: [`Legality::write_places`].
    pub(super) legality: Tensor,
    /// u32 `[4]`: [`SampleStep`].
    pub(super) step: Tensor,
    legality_words: usize,
    /// One buffer for each input, with the row of the env that is being written, as words.
    observed: Vec<Vec<u32>>,
    sets: SetObserver,
}

/// Inputs of a step besides the views.
pub(super) struct StepHeader<'a> {
    /// Envs that begin a trajectory.
    pub(super) fresh: &'a [bool],
    /// Whether the observations are added to the moments of the normalisers.
    pub(super) gather: bool,
    /// Key of the random numbers, and scale of V.
    pub(super) key: SampleStep,
}

impl StepInputs {
    /// Allocates the memory, with `words` words of legality per slot. Does not wait.
    pub(super) fn new(
        stream: &Stream,
        shape: &PolicyShape,
        envs: usize,
        words: usize,
    ) -> Result<Self> {
        let inputs = shape.inputs();
        let places = shape.slots * words;
        let width: usize = inputs.iter().map(|input| input.width).sum();
        let len = envs * (width + places) + SampleStep::WORDS;
        let whole = Tensor::zeros(stream, [len], DType::U32, Owner::Policy)?;
        let mut first = 0;
        let mut part = |dims: &[usize], dtype| {
            let view = whole.view(first, dims)?.reinterpret(dtype);
            first += dims.iter().product::<usize>();
            view
        };
        let rows = inputs.iter().map(|input| match input.width {
            1 => part(&[envs], input.dtype),
            width => part(&[envs, width], input.dtype),
        });
        Ok(Self {
            rows: rows.collect::<Result<_>>()?,
            legality: part(&[envs, places], DType::U32)?,
            step: part(&[SampleStep::WORDS], DType::U32)?,
            words: vec![0; len],
            whole,
            legality_words: words,
            observed: inputs.iter().map(|input| vec![0; input.width]).collect(),
            sets: SetObserver::new(),
        })
    }

    /// Forgets the sizes of blueprints, because the hosts that follow may have others.
    pub(super) fn forget_hosts(&mut self) {
        self.sets.forget();
    }

    /// Uploads the normalised observations and the legality of all envs. One copy to the device;
    /// does not wait.
    pub(super) fn send(
        &mut self,
        views: &[EnvView<'_>],
        normalizers: &mut Normalizers,
        header: StepHeader<'_>,
    ) -> Result<()> {
        let StepHeader { fresh, gather, key } = header;
        let envs = fresh.len();
        let places = self.legality.numel() / envs;
        for (env, (view, fresh)) in views.iter().zip(fresh).enumerate() {
            let legality = Legality::from_host(view.host);
            self.observe(view, &legality, normalizers, gather);
            // The input `keep` is 0 where a trajectory begins, which resets the LSTM state.
            if let Some(keep) = self.observed.last_mut() {
                keep.fill(if *fresh { 0.0f32 } else { 1.0 }.to_bits());
            }
            let mut rest = &mut self.words[..];
            for observed in &self.observed {
                let (rows, others) = rest.split_at_mut(envs * observed.len());
                rows[env * observed.len()..][..observed.len()].copy_from_slice(observed);
                rest = others;
            }
            legality.write_places(self.legality_words, &mut rest[env * places..][..places]);
        }
        let at = self.words.len() - SampleStep::WORDS;
        self.words[at..].copy_from_slice(&key.to_words());
        self.whole.copy_from_slice(&self.words)
    }

    /// Writes the observation of an env to `observed`, all but its `keep`.
    fn observe(
        &mut self,
        view: &EnvView<'_>,
        legality: &Legality,
        normalizers: &mut Normalizers,
        gather: bool,
    ) {
        let normalize = |normalizer: &mut Normalizer, row: &mut [f32]| {
            if gather { normalizer.gather(row) } else { normalizer.normalize(row) }
        };
        let Normalizers { observations: normalizer, sets } = normalizers;
        match (&mut self.observed[..], sets) {
            (
                [
                    observations,
                    slots,
                    slots_present,
                    slots_scale,
                    blueprints,
                    blueprints_present,
                    blueprints_scale,
                    _,
                ],
                Some([of_slots, of_blueprints]),
            ) => {
                let row = SetRow {
                    observations: floats(observations),
                    slots: floats(slots),
                    slots_present: floats(slots_present),
                    slots_scale: floats(slots_scale),
                    blueprints: floats(blueprints),
                    blueprints_present: floats(blueprints_present),
                    blueprints_scale: floats(blueprints_scale),
                };
                self.sets.write(view, legality, row);
                normalize(normalizer, floats(observations));
                let (has_slots, has) = (view.host.slots().len(), view.host.blueprints().len());
                let elements = floats(slots).chunks_exact_mut(SetObserver::SLOT).take(has_slots);
                elements.for_each(|slot| normalize(of_slots, slot));
                let elements = floats(blueprints).chunks_exact_mut(SetObserver::BLUEPRINT);
                elements.take(has).for_each(|blueprint| normalize(of_blueprints, blueprint));
            }
            ([observations, blueprints, ..], _) => {
                write_observation(view, floats(observations), blueprints);
                normalize(normalizer, floats(observations));
            }
            _ => {}
        }
    }
}

fn floats(words: &mut [u32]) -> &mut [f32] {
    bytemuck::cast_slice_mut(words)
}
