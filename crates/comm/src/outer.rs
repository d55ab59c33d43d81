//! The outer step of local training (DiLoCo): each rank trains its own replica of a model; at
//! intervals the ranks average the changes of their weights.
//!
//! ```text
//! Δ = mean over ranks of (θ − w)        θ: the last synchronised weights, w: the rank's weights
//! v = μ v + Δ
//! θ = θ − η (Δ + μ v);  w = θ           Nesterov's momentum as in PyTorch's SGD
//! ```
//!
//! Only Δ is exchanged: by any exchange of gradients, with its error feedback.
//!
//! Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models",
//! arXiv 2311.08105, 2023, algorithm 1, with η = 0.7 and μ = 0.9. With η = 1 and μ = 0 the weights
//! are averaged. Every operation rounds to the elements' type; Δ has the same bits on all ranks,
//! and so have θ and v.

use meristem_device::{Expect, Owner, Tensor};

use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::exchange::{Exchange, ExchangeOptions, upload};
use crate::spans::{Spans, parts};
use crate::sparse::feedback::{check_momentum, scale_add};
use crate::state::ExchangeState;

/// Options of the outer step. They must be the same on all ranks.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OuterOptions {
    /// Learning rate η, finite and above 0.
    pub lr: f64,
    /// Momentum μ, at least 0 and below 1.
    pub momentum: f64,
}

/// The values of Douillard et al.
impl Default for OuterOptions {
    fn default() -> Self {
        OuterOptions { lr: 0.7, momentum: 0.9 }
    }
}

/// The outer step of a model's weights. When the model grows, create a new one and transfer the
/// state per parameter, with [`export`](OuterStep::export) and [`import`](OuterStep::import): the
/// momentum of a parameter that appears starts at zero.
pub struct OuterStep {
    options: OuterOptions,
    /// Names and lengths of the parameters, in order.
    parameters: Vec<(String, usize)>,
    exchange: Exchange,
    /// θ, v and Δ: the parameters one after the other.
    synchronised: Tensor,
    velocity: Tensor,
    difference: Tensor,
}

impl OuterStep {
    /// An outer step for weights like these, each with its parameter's name, of one type and on one
    /// stream. `exchange` averages the differences; its reduction must be the mean. Allocates three
    /// times the weights' memory and the memory of the exchange.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for invalid options or tensors; [`Error::Device`].
    pub fn new(
        options: OuterOptions,
        exchange: &ExchangeOptions,
        weights: &[(&str, &Tensor)],
    ) -> Result<OuterStep> {
        let operation = "OuterStep::new";
        if !(options.lr.is_finite() && options.lr > 0.0) {
            return Err(Error::argument(operation, "lr", "finite, above 0", options.lr));
        }
        check_momentum(operation, options.momentum)?;
        let tensors: Vec<&Tensor> = weights.iter().map(|(_, tensor)| *tensor).collect();
        let spans = Spans::new(operation, &tensors)?;
        let (stream, dtype) = (spans.stream(), spans.dtype());
        let zeros = || Tensor::zeros(stream, [spans.len()], dtype, Owner::Collectives);
        let parameters: Vec<(String, usize)> =
            weights.iter().map(|(name, tensor)| ((*name).to_owned(), tensor.numel())).collect();
        let difference = zeros()?;
        let views = views(&difference, &parameters)?;
        let named: Vec<(&str, &Tensor)> =
            parameters.iter().map(|(name, _)| name.as_str()).zip(&views).collect();
        let exchange = Exchange::new(exchange, &named)?;
        let (synchronised, velocity) = (zeros()?, zeros()?);
        Ok(OuterStep { options, parameters, exchange, synchronised, velocity, difference })
    }

    /// Begins local training from these weights, which must be equal on all ranks. Not collective;
    /// does not wait for the device.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for other tensors than [`new`](OuterStep::new) got;
    /// [`Error::Device`].
    pub fn begin(&mut self, weights: &[&Tensor]) -> Result<()> {
        let weights = self.check("OuterStep::begin", weights)?;
        copy(&weights, &Spans::try_from(&self.synchronised)?)
    }

    /// Allocates the memory of the next exchange, so that over threads on one device
    /// [`run`](OuterStep::run) only launches and copies on the device. Not collective; does not
    /// wait for the device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn prepare(&mut self, comm: &Communicator) -> Result<()> {
        self.exchange.prepare(comm)
    }

    /// Makes an outer step: replaces the weights of this rank, in the order of
    /// [`new`](OuterStep::new), by the new synchronised ones, with the same bits on every rank.
    /// Local training continues from them. Waits for the device as [`Exchange::run`] does.
    ///
    /// # Errors
    /// The errors of [`Exchange::run`].
    pub fn run(&mut self, comm: &mut Communicator, weights: &[&Tensor]) -> Result<()> {
        let result = self.try_run(comm, weights);
        comm.broadcast_error(result)
    }

    fn try_run(&mut self, comm: &mut Communicator, weights: &[&Tensor]) -> Result<()> {
        let operation = "OuterStep::run";
        let weights = self.check(operation, weights)?;
        let OuterOptions { lr, momentum } = self.options;
        let [synchronised, velocity, difference] =
            [&self.synchronised, &self.velocity, &self.difference].map(Spans::try_from);
        let (synchronised, velocity, difference) = (synchronised?, velocity?, difference?);
        copy(&weights, &difference)?;
        scale_add("outer step, difference", &difference, -1.0, &synchronised)?;
        let views = views(&self.difference, &self.parameters)?;
        self.exchange.run(comm, &views.iter().collect::<Vec<_>>())?;
        scale_add("outer step, momentum", &velocity, momentum, &difference)?;
        // The weights are not needed any more, so their memory is used for the step.
        copy(&velocity, &weights)?;
        scale_add("outer step, nesterov", &weights, momentum, &difference)?;
        scale_add("outer step, weights", &weights, -lr, &synchronised)?;
        copy(&weights, &synchronised)
    }

    /// Exports momentum and the state of the exchange. The synchronised weights are not part of it:
    /// export and import right after an outer step, and [`begin`](OuterStep::begin) after an
    /// import. Waits for the device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn export(&self) -> Result<ExchangeState> {
        let mut state = self.exchange.export()?;
        let views = views(&self.velocity, &self.parameters)?;
        let all = meristem_device::read_back(&views.iter().collect::<Vec<_>>())?;
        for ((name, _), bytes) in self.parameters.iter().zip(all) {
            state.kept.entry(name.clone()).or_default().outer = bytes;
        }
        Ok(state)
    }

    /// Replaces the current state by another outer step's, as [`Exchange::import`].
    ///
    /// # Errors
    /// As [`Exchange::import`].
    pub fn import(&mut self, comm: &Communicator, state: &ExchangeState) -> Result<()> {
        let size = self.velocity.dtype().size();
        let of = |name: &String| state.kept.get(name).filter(|kept| !kept.outer.is_empty());
        for (name, len) in &self.parameters {
            let got = of(name).map_or(len * size, |kept| kept.outer.len());
            if got != len * size {
                let expected = format!("{} bytes, as it is now", len * size);
                return Err(Error::argument("OuterStep::import", name, expected, got));
            }
        }
        let velocity = Tensor::zeros(
            self.velocity.stream(),
            [self.velocity.numel()],
            self.velocity.dtype(),
            Owner::Collectives,
        )?;
        for ((name, _), view) in self.parameters.iter().zip(views(&velocity, &self.parameters)?) {
            if let Some(kept) = of(name) {
                upload(&view, &kept.outer)?;
            }
        }
        // Last, as it changes the exchange unless it fails.
        self.exchange.import(comm, state)?;
        self.velocity = velocity;
        Ok(())
    }

    /// The weights as one sequence.
    fn check(&self, operation: &'static str, weights: &[&Tensor]) -> Result<Spans> {
        if weights.len() != self.parameters.len() {
            let expected = format!("{} tensors", self.parameters.len());
            return Err(Error::argument(operation, "weights", expected, weights.len()));
        }
        let expect = Expect::stream(self.velocity.stream()).dtype(self.velocity.dtype());
        for ((name, len), tensor) in self.parameters.iter().zip(weights) {
            expect.check(operation, name, tensor)?;
            if tensor.numel() != *len {
                let expected = format!("of {len} elements");
                return Err(Error::argument(operation, name, expected, tensor.numel()));
            }
        }
        Spans::new(operation, weights)
    }
}

/// Parts of a flat tensor, one for each parameter.
fn views(flat: &Tensor, parameters: &[(String, usize)]) -> Result<Vec<Tensor>> {
    let mut start = 0;
    let view = |(_, len): &(String, usize)| {
        let view = flat.view(start, [*len])?;
        start += len;
        Ok(view)
    };
    parameters.iter().map(view).collect()
}

/// Copies elements on the device, in one command.
fn copy(from: &Spans, to: &Spans) -> Result<()> {
    let parts = parts([from, to].into_iter(), &(0..from.len()));
    let both = |part: std::ops::Range<usize>| Ok([from.window(part.clone())?, to.window(part)?]);
    let pairs: Vec<[Spans; 2]> = parts.into_iter().map(both).collect::<Result<_>>()?;
    let pieces: Vec<(&Tensor, &Tensor)> =
        pairs.iter().map(|[from, to]| (&from.pieces()[0], &to.pieces()[0])).collect();
    if pieces.is_empty() { Ok(()) } else { Ok(to.stream().copy("outer step, copy", &pieces)?) }
}
