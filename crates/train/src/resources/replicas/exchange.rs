//! Exchange of one rank: of gradients in every batch, or of weights after every round of local
//! steps.

use std::num::NonZeroU32;

use meristem_comm::{Communicator, Exchange, ExchangeState, OuterOptions, OuterStep};
use meristem_device::Tensor;
use meristem_nn::Network;

use crate::error::Result;
use crate::settings::ExchangeKind;

/// Exchange, created at the start of a step; before that, the saved state with which it starts.
pub(super) enum LazyExchange {
    Saved(ExchangeState),
    Open {
        /// Names and lengths of the exchanged tensors.
        form: Vec<(String, usize)>,
        exchange: RankExchange,
    },
}

impl Default for LazyExchange {
    fn default() -> Self {
        Self::Saved(ExchangeState::default())
    }
}

/// Exchange for the parameters of a network.
pub(super) enum RankExchange {
    Gradients(Box<Exchange>),
    Weights {
        outer: Box<OuterStep>,
        /// Local steps of a round.
        steps: NonZeroU32,
    },
}

impl LazyExchange {
    /// State of the exchange. Waits for the device if the exchange is open.
    pub(super) fn state(&self) -> Result<ExchangeState> {
        Ok(match self {
            Self::Saved(state) => state.clone(),
            Self::Open { exchange: RankExchange::Gradients(exchange), .. } => exchange.export()?,
            Self::Open { exchange: RankExchange::Weights { outer, .. }, .. } => outer.export()?,
        })
    }

    /// Creates the exchange for the network's current parameters, unless it is open for them, and
    /// prepares it for an epoch of `batches` batches. The state of parameters that still exist is
    /// kept.
    pub(super) fn open(
        &mut self,
        kind: ExchangeKind,
        comm: &Communicator,
        network: &mut Network,
        batches: usize,
    ) -> Result<()> {
        let tensors = match kind.local_steps {
            Some(_) => network.trained_parameters()?,
            None => network.gradient_buffers()?,
        };
        let form: Vec<(String, usize)> =
            tensors.iter().map(|(name, tensor)| (name.to_string(), tensor.numel())).collect();
        let named: Vec<(&str, &Tensor)> = tensors.iter().map(|(n, t)| (*n, t)).collect();
        if !matches!(self, Self::Open { form: known, .. } if *known == form) {
            let mut state = self.state()?;
            // A parameter that became wider begins anew.
            state.kept.retain(|name, kept| {
                let of = form.iter().find(|(known, _)| known == name);
                of.is_none_or(|(_, len)| kept.has_length(len * size_of::<f32>()))
            });
            let mut exchange = RankExchange::new(kind, &named, batches)?;
            exchange.import(comm, &state)?;
            *self = Self::Open { form, exchange };
        }
        match self {
            Self::Open { exchange: RankExchange::Gradients(exchange), .. } => {
                exchange.prepare(comm)?;
            }
            Self::Open { exchange: RankExchange::Weights { outer, .. }, .. } => {
                // The replicas have just been made equal.
                outer.begin(&named.iter().map(|(_, tensor)| *tensor).collect::<Vec<_>>())?;
                outer.prepare(comm)?;
            }
            Self::Saved(_) => {}
        }
        Ok(())
    }
}

impl RankExchange {
    fn new(kind: ExchangeKind, tensors: &[(&str, &Tensor)], batches: usize) -> Result<Self> {
        Ok(match kind.local_steps {
            None => {
                let options = kind.method.warming_up(batches);
                Self::Gradients(Box::new(Exchange::new(&options, tensors)?))
            }
            Some(steps) => {
                let options = kind.method.warming_up(batches.div_ceil(steps.get() as usize));
                let outer = OuterStep::new(OuterOptions::default(), &options, tensors)?;
                Self::Weights { outer: Box::new(outer), steps }
            }
        })
    }

    fn import(&mut self, comm: &Communicator, state: &ExchangeState) -> Result<()> {
        match self {
            Self::Gradients(exchange) => exchange.import(comm, state)?,
            Self::Weights { outer, .. } => outer.import(comm, state)?,
        }
        Ok(())
    }

    /// Updates the network, which holds the gradient of batch number `batch` of `batches`. An
    /// exchange of gradients runs before the update. An exchange of weights makes the outer step
    /// after the last update of a round of local steps; the last round ends with the epoch.
    /// `clips`: the gradient is clipped before the exchange, at `√ranks` times the norm.
    pub(super) fn update(
        &mut self,
        comm: &mut Communicator,
        network: &mut Network,
        clips: bool,
        (batch, batches): (usize, usize),
    ) -> Result<()> {
        match self {
            Self::Gradients(exchange) => {
                if clips {
                    network.clip((comm.size() as f32).sqrt())?;
                }
                let gradients = network.gradients()?;
                let gradients: Vec<&Tensor> = gradients.iter().map(|(_, tensor)| tensor).collect();
                exchange.run(comm, &gradients)?;
                network.apply()?;
            }
            Self::Weights { outer, steps } => {
                network.apply()?;
                let done = batch + 1;
                if done == batches || done.is_multiple_of(steps.get() as usize) {
                    let weights = network.trained_parameters()?;
                    let weights: Vec<&Tensor> = weights.iter().map(|(_, tensor)| tensor).collect();
                    outer.run(comm, &weights)?;
                }
            }
        }
        Ok(())
    }
}
