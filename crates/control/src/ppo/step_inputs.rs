//! Inputs of a policy step, uploaded in one copy: observations, legality, and the key of the random
//! numbers.

use meristem_device::{DType, Owner, Result, Stream, Tensor};
use meristem_nn::kernels::sample::SampleStep;

use super::normalizers::Normalizers;
use crate::layer_observation::{self, LayerHistory};
use crate::masks::Legality;
use crate::normalizer::Normalizer;
use crate::observation::write_observation;
use crate::policy::PolicyShape;
use crate::set_observation::{SetBuffers, SetObserver, SetRow};
use crate::view::EnvView;
use crate::widening::{self, LayerWidening};

/// Host memory of the inputs, and device memory with a view of each input.
#[derive(Debug)]
pub(super) struct StepInputs {
    words: Vec<u32>,
    /// u32 `[words]`.
    whole: Tensor,
    /// [`PolicyShape::inputs`], `[envs, width]` each, or `[envs]` for a width of 1.
    pub(super) rows: Vec<Tensor>,
    /// u32 `[envs, places · words]`: [`Legality::write_places`], then [`Legality::write_layers`].
    pub(super) legality: Tensor,
    /// u32 `[4]`: [`SampleStep`].
    pub(super) step: Tensor,
    legality_words: usize,
    /// Places of slots in a row of `legality`.
    slots: usize,
    /// Memory about the layers of each env; empty unless the policy observes layers.
    pub(super) layers: Vec<LayerHistory>,
    /// One buffer for each input, with the row of the env that is being written, as words.
    observed: Vec<Vec<u32>>,
    sets: SetObserver,
}

/// An env that is being observed.
struct SeenEnv<'a> {
    /// Its place among the envs of this rank.
    env: usize,
    view: &'a EnvView<'a>,
    legality: &'a Legality,
    /// Changes of width that the policy may choose.
    widenings: &'a [LayerWidening],
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
        let layers = shape.layers();
        let places = (shape.slots + layers.map_or(0, |layers| layers.places)) * words;
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
            slots: shape.slots,
            layers: layers.map_or(vec![], |_| vec![LayerHistory::default(); envs]),
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
            let mut widenings = vec![];
            if let Some(history) = self.layers.get_mut(env) {
                if *fresh {
                    *history = LayerHistory::default();
                }
                history.record(view);
                widenings = widening::widenings(view);
            }
            let legality = Legality::with_widenings(view.host, &widenings);
            let seen = SeenEnv { env, view, legality: &legality, widenings: &widenings };
            self.observe(&seen, normalizers, gather);
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
            let (slots, layers) =
                rest[env * places..][..places].split_at_mut(self.slots * self.legality_words);
            legality.write_places(self.legality_words, slots);
            legality.write_layers(self.legality_words, layers);
        }
        let at = self.words.len() - SampleStep::WORDS;
        self.words[at..].copy_from_slice(&key.to_words());
        self.whole.copy_from_slice(&self.words)
    }

    /// Writes the observation of an env to `observed`, all but its `keep`.
    fn observe(&mut self, seen: &SeenEnv<'_>, normalizers: &mut Normalizers, gather: bool) {
        let SeenEnv { env, view, legality, widenings } = *seen;
        let normalize = |normalizer: &mut Normalizer, row: &mut [f32]| {
            if gather { normalizer.gather(row) } else { normalizer.normalize(row) }
        };
        let Normalizers { observations: normalizer, sets } = normalizers;
        let [observations, others @ ..] = &mut self.observed[..] else { return };
        let observations = floats(observations);
        let Some(sets) = sets else {
            if let Some(blueprints) = others.first_mut() {
                write_observation(view, observations, blueprints);
                normalize(normalizer, observations);
            }
            return;
        };
        // The three inputs of each set; `keep` is left over.
        let mut parts = others.chunks_exact_mut(3).filter_map(set_buffers);
        let (Some(slots), Some(blueprints)) = (parts.next(), parts.next()) else { return };
        let mut layers = parts.next();
        let mut row = SetRow { observations, slots, blueprints };
        self.sets.write(view, legality, &mut row);
        if let (Some(layers), Some(history)) = (&mut layers, self.layers.get(env)) {
            layers.write_presence(widenings.len());
            layer_observation::write(view, widenings, history, layers.elements);
        }
        normalize(normalizer, row.observations);
        let all = [row.slots, row.blueprints].into_iter().chain(layers);
        for (SetBuffers { elements, present, .. }, normalizer) in all.zip(sets) {
            let elements = elements.chunks_exact_mut(normalizer.len()).zip(present);
            let elements = elements.filter(|(_, present)| **present != 0.0);
            elements.for_each(|(element, _)| normalize(normalizer, element));
        }
    }
}

/// The buffers of a set: words of its elements, presence and scale.
fn set_buffers(words: &mut [Vec<u32>]) -> Option<SetBuffers<'_>> {
    let [elements, present, scale] = words else { return None };
    let [elements, present, scale] = [elements, present, scale].map(|words| floats(words));
    Some(SetBuffers { elements, present, scale })
}

fn floats(words: &mut [u32]) -> &mut [f32] {
    bytemuck::cast_slice_mut(words)
}
