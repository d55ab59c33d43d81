//! Error feedback (X3): elements that were not sent are added to the next gradient. With momentum
//! correction (X7) the velocity takes the place of the gradient.
//!
//! acc = residual + gradient. The picks are selected elements of acc; those that become part of the
//! result count as sent. The next residual, residual', is minus zero at the sent elements, since
//! adding minus zero changes no bit, and equals acc at all others. So sent + residual' = residual +
//! gradient, bit for bit.
//!
//! With momentum m, the velocity u = m u + gradient replaces the gradient. It is cleared at the
//! sent elements, where it would otherwise push in an outdated direction (Lin et al., "Deep
//! Gradient Compression", ICLR 2018). If all elements are sent, no direction is outdated: the
//! velocity is kept, and the sum of velocities equals ordinary momentum.

use meristem_device::{Args, DType, Owner, Stream, Tensor};

use super::lists::{Candidates, Lists, NONE};
use super::pieces::SliceList;
use super::select::{ElementSource, Picks, RUN, SourceSlice, top_k};
use crate::error::{Error, Result};
use crate::gpu;
use crate::number::{Magnitude, SumElement, with_number};
use crate::spans::{Spans, parts};

/// State of a rank between exchanges of one tensor.
pub(crate) struct Feedback {
    pub(crate) residual: Tensor,
    pub(crate) momentum: Option<Momentum>,
}

/// Momentum correction.
pub(crate) struct Momentum {
    pub(crate) factor: f64,
    pub(crate) velocity: Tensor,
}

/// Checks that the factor is in [0, 1), which bounds the velocity.
pub(crate) fn check_momentum(operation: &'static str, factor: f64) -> Result<f64> {
    if (0.0..1.0).contains(&factor) {
        return Ok(factor);
    }
    Err(Error::argument(operation, "momentum", "at least 0, below 1", factor))
}

impl Momentum {
    pub(crate) fn new(stream: &Stream, dtype: DType, len: usize, factor: f64) -> Result<Momentum> {
        Ok(Momentum { factor, velocity: minus_zeros(stream, dtype, len)? })
    }

    /// Updates the velocity by a gradient and returns it.
    pub(crate) fn advance(&self, gradient: &Spans) -> Result<Spans> {
        let velocity = Spans::try_from(&self.velocity)?;
        scale_add("feedback, velocity", &velocity, self.factor, gradient)?;
        Ok(velocity)
    }
}

/// target = factor target + added, rounded after each operation. `target` and `added` have the same
/// number of elements, and their memory does not overlap.
pub(crate) fn scale_add(
    operation: &'static str,
    target: &Spans,
    factor: f64,
    added: &Spans,
) -> Result<()> {
    let mut pieces = Vec::new();
    for part in parts([target, added].into_iter(), &(0..target.len())) {
        pieces.push([target.window(part.clone())?, added.window(part)?]);
    }
    let mut launch = target.stream().launch(operation);
    for [target, added] in &pieces {
        launch = launch.write(&target.pieces()[0]).read(&added.pieces()[0]);
    }
    let dtype = target.dtype();
    let launch = launch.gpu(|| {
        let call = |(i, [target, added]): (usize, &[Spans; 2])| {
            let target = gpu::whole(2 * i, &target.pieces()[0]);
            gpu::advance(dtype, gpu::whole(2 * i + 1, &added.pieces()[0]), target, factor)
        };
        pieces.iter().enumerate().map(call).collect::<Vec<_>>()
    });
    with_number!(dtype, T => launch.run(move |args| {
        let factor = T::from_f64(factor);
        for at in (0..args.len()).step_by(2) {
            for (target, added) in args.write::<T>(at).iter_mut().zip(args.read::<T>(at + 1)) {
                *target = target.times(factor).plus(*added);
            }
        }
    })?, unreachable!("checked when the exchange was made"));
    Ok(())
}

impl Feedback {
    pub(crate) fn new(
        stream: &Stream,
        dtype: DType,
        len: usize,
        momentum: Option<f64>,
    ) -> Result<Feedback> {
        let momentum = match momentum {
            Some(factor) => Some(Momentum::new(stream, dtype, len, factor)?),
            None => None,
        };
        Ok(Feedback { residual: minus_zeros(stream, dtype, len)?, momentum })
    }

    /// Velocity of momentum correction; `None` without it.
    pub(crate) fn velocity(&self) -> Option<&Tensor> {
        self.momentum.as_ref().map(|momentum| &momentum.velocity)
    }

    /// Adds the gradient, or the updated velocity, to the residual, and returns the residual.
    pub(crate) fn accumulate(&self, gradient: &Spans) -> Result<Spans> {
        let residual = Spans::try_from(&self.residual)?;
        let velocity = self.momentum.as_ref().map(|momentum| momentum.advance(gradient));
        let velocity = velocity.transpose()?;
        scale_add("feedback, residual", &residual, 1.0, velocity.as_ref().unwrap_or(gradient))?;
        Ok(residual)
    }

    /// Adds the gradient, or the updated velocity, to the residual, writes the result to `output`,
    /// and clears the residual. For an exchange of all elements.
    pub(crate) fn drain(&self, gradient: &Spans, output: &Spans) -> Result<()> {
        let added = match &self.momentum {
            Some(momentum) => &momentum.advance(gradient)?,
            None => gradient,
        };
        let in_place = added.is_same(output);
        let mut pieces = Vec::new();
        for part in parts([added, output].into_iter(), &(0..output.len())) {
            pieces.push([output.window(part.clone())?, added.window(part)?]);
        }
        let mut launch = output.stream().launch("feedback, drain").write(&self.residual);
        for [output, added] in &pieces {
            launch = launch.write(&output.pieces()[0]);
            launch = if in_place { launch } else { launch.read(&added.pieces()[0]) };
        }
        let step = if in_place { 1 } else { 2 };
        let launch = launch.gpu(|| {
            let (dtype, mut start) = (output.dtype(), 0);
            let call = |(i, [output, _]): (usize, &[Spans; 2])| {
                let (at, output) = (1 + i * step, &output.pieces()[0]);
                let to = gpu::whole(at, output);
                let added = gpu::Piece { argument: at + step - 1, ..to };
                let residual = gpu::part(0, dtype, start, to.len);
                start += to.len;
                gpu::drain(dtype, added, residual, to)
            };
            pieces.iter().enumerate().map(call).collect::<Vec<_>>()
        });
        with_number!(gradient.dtype(), T => launch.run(move |args| {
            let mut rest = args.write::<T>(0);
            for at in (1..args.len()).step_by(step) {
                let output = args.write::<T>(at);
                if !in_place {
                    output.copy_from_slice(args.read(at + 1));
                }
                let (residual, later) = rest.split_at_mut(output.len());
                for (output, residual) in output.iter_mut().zip(residual) {
                    *output = residual.plus(*output);
                    *residual = T::NEUTRAL;
                }
                rest = later;
            }
        })?, unreachable!("checked when the exchange was made"));
        Ok(())
    }

    /// Clears residual and velocity at the indices of sent elements.
    pub(crate) fn clear(&self, indices: &Tensor) -> Result<()> {
        let mut launch =
            indices.stream().launch("feedback, clear").read(indices).write(&self.residual);
        if let Some(momentum) = &self.momentum {
            launch = launch.write(&momentum.velocity);
        }
        let dtype = self.residual.dtype();
        let kept = if self.momentum.is_some() { 1..3 } else { 1..2 };
        let launch = launch.gpu(|| {
            let indices = gpu::whole(0, indices);
            let kept =
                kept.map(|argument| gpu::Piece { argument, ..gpu::whole(1, &self.residual) });
            kept.map(|kept| gpu::clear(dtype, indices, kept)).collect::<Vec<_>>()
        });
        with_number!(dtype, T => launch.run(|args| {
            for argument in 1..args.len() {
                let kept = args.write::<T>(argument);
                for index in args.read::<u32>(0).iter().take_while(|index| **index != NONE) {
                    kept[*index as usize] = T::NEUTRAL;
                }
            }
        })?, unreachable!("checked when the exchange was made"));
        Ok(())
    }
}

/// A residual or velocity without any sum so far: minus zeros.
fn minus_zeros(stream: &Stream, dtype: DType, len: usize) -> Result<Tensor> {
    let tensor = Tensor::empty(stream, [len], dtype, Owner::Collectives)?;
    let launch = stream.launch("feedback, minus zeros").write(&tensor);
    let launch = launch.gpu(|| gpu::fill_minus_zero(dtype, gpu::whole(0, &tensor)));
    with_number!(
        dtype,
        T => launch.run(|args| args.write::<T>(0).fill(T::NEUTRAL))?,
        unreachable!("checked when the exchange was made")
    );
    Ok(tensor)
}

/// Selects the largest elements of the gradient, or of residual plus gradient, which becomes the
/// new residual. `picks` is padded.
///
/// `threshold` is the stored threshold, one i64, and whether to recompute it. If not, the selection
/// uses the stored threshold instead of the exact one. A selection that fills `picks` updates it.
pub(crate) fn select(
    gradient: &Spans,
    feedback: Option<&Feedback>,
    picks: &Lists,
    candidates: &Candidates,
    threshold: Option<(&Tensor, bool)>,
) -> Result<()> {
    let pieces = gradient.pieces().len();
    if candidates.tables.is_some() && feedback.is_none() && pieces > gpu::PIECES_MAX {
        let expected = format!("in at most {} pieces of memory", gpu::PIECES_MAX);
        return Err(Error::argument("topk, select", "input", expected, pieces));
    }
    let mut launch = picks
        .indices
        .stream()
        .launch("topk, select")
        .write(&picks.indices)
        .write(&picks.values)
        .write(&candidates.lists.indices)
        .write(&candidates.lists.values);
    let mut refresh = None;
    if let Some((threshold, now)) = threshold {
        launch = launch.write(threshold);
        refresh = Some(now);
    }
    let mut factor = None;
    if let Some(feedback) = feedback {
        launch = launch.write(&feedback.residual);
        if let Some(momentum) = &feedback.momentum {
            launch = launch.write(&momentum.velocity);
            factor = Some(momentum.factor);
        }
    }
    launch = gradient.pieces().iter().fold(launch, |launch, piece| launch.read(piece));
    for tensor in candidates.tables.iter().flat_map(gpu::SelectionTables::tensors) {
        launch = launch.write(tensor);
    }
    launch = launch.gpu(|| on_gpu(gradient, feedback, picks, candidates, threshold));
    let kind = SelectArguments { refresh, has_residual: feedback.is_some(), factor };
    with_number!(
        gradient.dtype(),
        T => launch.run(move |args| run::<T>(args, &kind))?,
        unreachable!("checked when the exchange was made")
    );
    Ok(())
}

/// The selection on a CUDA device.
fn on_gpu(
    gradient: &Spans,
    feedback: Option<&Feedback>,
    picks: &Lists,
    candidates: &Candidates,
    threshold: Option<(&Tensor, bool)>,
) -> Vec<gpu::Call> {
    let mut arguments = 4..;
    let mut next = |tensor: &Tensor| gpu::whole(arguments.next().unwrap_or(0), tensor);
    let threshold = threshold.map(|(threshold, refresh)| (next(threshold), !refresh));
    let residual = feedback.map(|feedback| next(&feedback.residual));
    let momentum = feedback.and_then(|feedback| feedback.momentum.as_ref());
    let velocity = momentum.map(|momentum| (next(&momentum.velocity), momentum.factor));
    let gradient_at: Vec<_> = gradient.pieces().iter().map(&mut next).collect();
    let Candidates { lists, tables } = candidates;
    gpu::select(&gpu::Elements {
        dtype: gradient.dtype(),
        gradient: &gradient_at,
        residual,
        velocity,
        threshold,
        candidates: lists.at(2),
        picks: picks.at(0),
        tables: tables.as_ref().map(|tables| gpu::TableArguments::at(arguments.start, tables)),
    })
}

/// The optional arguments of the selection kernel, which follow the first four and precede the
/// gradient.
struct SelectArguments {
    /// Whether to recompute the stored threshold; `None` without a threshold.
    refresh: Option<bool>,
    /// Whether there is a residual.
    has_residual: bool,
    /// Factor of momentum; `None` without a velocity.
    factor: Option<f64>,
}

fn run<T: SumElement>(args: &mut Args<'_>, kind: &SelectArguments) {
    let (indices, values) = (args.write::<u32>(0), args.write::<T>(1));
    let candidates = Picks { indices: args.write::<u32>(2), values: args.write::<T>(3) };
    let mut next = 4;
    let mut threshold = None;
    if kind.refresh.is_some() {
        threshold = args.write::<i64>(next).first_mut();
        next += 1;
    }
    let known = match (&threshold, kind.refresh) {
        (Some(threshold), Some(false)) => Some(T::Magnitude::narrow(**threshold as u64)),
        _ => None,
    };
    let first = next + usize::from(kind.has_residual) + usize::from(kind.factor.is_some());
    let mut gradient = SliceList::new((first..args.len()).map(|at| args.read::<T>(at)));
    let isa = args.isa();
    let picks = Picks { indices: &mut *indices, values: &mut *values };
    let picked = match (kind.has_residual, kind.factor) {
        (false, _) => top_k(isa, &mut gradient, known, candidates, picks),
        (true, factor) => {
            let residual = args.write(next);
            let velocity = factor.map(|factor| (args.write(next + 1), T::from_f64(factor)));
            let mut source = FeedbackSource { residual, velocity, gradient };
            top_k(isa, &mut source, known, candidates, picks)
        }
    };
    indices[picked..].fill(NONE);
    values[picked..].fill(T::ZERO);
    // A full list has exactly the largest elements, even if a known threshold was used: if more
    // elements reach the threshold than fit, the largest of them are selected.
    if let (Some(threshold), true) = (threshold, picked == indices.len()) {
        let least = values.iter().map(|value| value.magnitude()).min();
        *threshold = least.map_or(0, |least| least.wide() as i64);
    }
}

/// The sum of residual and gradient, or of residual and velocity (with the factor of momentum).
/// Computed when elements are visited, in one pass over memory.
struct FeedbackSource<'a, T> {
    residual: &'a mut [T],
    velocity: Option<(&'a mut [T], T)>,
    gradient: SliceList<'a, T>,
}

/// The part of [`FeedbackSource`] for one slice of the gradient.
struct FeedbackPart<'a, T> {
    residual: &'a mut [T],
    velocity: Option<(&'a mut [T], T)>,
    gradient: &'a [T],
}

impl<'a, T: SumElement> ElementSource for FeedbackSource<'a, T> {
    type Item = T;
    type SourceSlice<'p>
        = FeedbackPart<'p, T>
    where
        Self: 'p;
    fn slices(&self) -> &[&[T]] {
        self.gradient.slices()
    }
    #[inline(always)]
    fn part(&mut self, slice: usize, start: usize) -> FeedbackPart<'_, T> {
        let gradient = self.gradient.slices()[slice];
        let at = start..start + gradient.len();
        let velocity = &mut self.velocity;
        let velocity = velocity.as_mut().map(|(all, factor)| (&mut all[at.clone()], *factor));
        FeedbackPart { residual: &mut self.residual[at], velocity, gradient }
    }
    #[inline(always)]
    fn peek(&self, start: usize) -> [T; RUN] {
        let mut run = self.gradient.run(start);
        let at = start..start + RUN;
        if let Some((velocity, factor)) = &self.velocity {
            for (value, velocity) in run.iter_mut().zip(&velocity[at.clone()]) {
                *value = velocity.times(*factor).plus(*value);
            }
        }
        for (value, residual) in run.iter_mut().zip(&self.residual[at]) {
            *value = residual.plus(*value);
        }
        run
    }
    fn visited(&self) -> SliceList<'_, T> {
        SliceList::from(&*self.residual)
    }
}

impl<T: SumElement> SourceSlice for FeedbackPart<'_, T> {
    type Item = T;
    #[inline(always)]
    fn visit(&mut self, start: usize, out: &mut [T]) {
        let at = start..start + out.len();
        let (residual, gradient) = (&mut self.residual[at.clone()], &self.gradient[at.clone()]);
        let kept = out.iter_mut().zip(residual).zip(gradient);
        match &mut self.velocity {
            Some((velocity, factor)) => {
                for (((out, residual), gradient), velocity) in kept.zip(&mut velocity[at]) {
                    *velocity = velocity.times(*factor).plus(*gradient);
                    *residual = residual.plus(*velocity);
                    *out = *residual;
                }
            }
            None => {
                for ((out, residual), gradient) in kept {
                    *residual = residual.plus(*gradient);
                    *out = *residual;
                }
            }
        }
    }
}
