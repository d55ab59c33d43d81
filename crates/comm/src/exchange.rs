//! The exchange of a model's gradients, step by step (X7). Small tensors are summed densely; the
//! others are exchanged in buckets, by the chosen method. Residuals and velocities are stored per
//! parameter.

use std::collections::{BTreeMap, BTreeSet};

use meristem_device::{DType, Expect, MemoryFormat, Stream, Tensor};

use crate::auto::{Method, TimingTable};
use crate::check;
use crate::communicator::Communicator;
use crate::error::{Error, Result};
use crate::gpu;
use crate::int8::Int8Sum;
use crate::number::with_number;
use crate::spans::Spans;
use crate::sparse::feedback::{Momentum, check_momentum};
use crate::sparse::sum::{FeedbackMode, SparseMethod, SparseSum};
use crate::sparse::{check_density, picks};
use crate::state::{ExchangeState, ParameterState};
use crate::transport::{CollectiveCall, Reduction, Sum, SumOrder};

/// Options of a gradient exchange. They must be the same on all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct ExchangeOptions {
    /// Algorithm of the sum.
    pub method: Method,
    /// Share of a bucket's elements that each rank selects; [`picks`] gives their number.
    pub density: f64,
    /// Number of elements that each rank selects from a bucket, instead of `density`.
    pub k: Option<usize>,
    /// Densities of the first steps, in order, each for `warm_up_steps`.
    pub warm_up: Vec<f64>,
    /// Number of steps per density of the warm-up.
    pub warm_up_steps: u64,
    /// Treatment of elements that are not sent. [`FeedbackMode::Momentum`] applies to all tensors,
    /// so densely summed tensors also have a velocity.
    pub keep: FeedbackMode,
    /// Sum or mean.
    pub reduction: Reduction,
    /// Tensors with fewer elements are summed densely, in separate buckets.
    pub small: usize,
    /// Largest size of a bucket of several tensors, in elements; a tensor is never split. 0: one
    /// tensor per bucket.
    pub bucket: usize,
    /// Measurements for [`Method::Auto`].
    pub table: TimingTable,
}

impl Default for ExchangeOptions {
    fn default() -> Self {
        ExchangeOptions {
            method: Method::Dense,
            density: 0.01,
            k: None,
            warm_up: Vec::new(),
            warm_up_steps: 1,
            keep: FeedbackMode::Residual,
            reduction: Reduction::Mean,
            small: 1024,
            bucket: 1 << 20,
            table: TimingTable::default(),
        }
    }
}

/// The exchange of a model's gradients. When the model grows, create a new one and transfer the
/// state per parameter, with [`export`](Exchange::export) and [`import`](Exchange::import).
pub struct Exchange {
    options: ExchangeOptions,
    stream: Stream,
    parameters: Vec<Parameter>,
    buckets: Vec<Bucket>,
    step: u64,
}

struct Parameter {
    name: String,
    dtype: DType,
    len: usize,
    format: MemoryFormat,
}

/// Tensors that are exchanged as one sequence, without a copy.
struct Bucket {
    /// Indices of the parameters, each with its first element in the bucket.
    members: Vec<(usize, usize)>,
    len: usize,
    dtype: DType,
    sum: BucketSum,
}

/// Algorithm of a bucket, with its memory.
enum BucketSum {
    /// The dense sum: of the velocities if there is a momentum, else of the gradients.
    Dense(Option<Momentum>),
    Sparse(SparseSum),
    Int8(Int8Sum),
}

impl Exchange {
    /// An exchange for gradients like these, each with its parameter's name. All gradients are on
    /// one stream.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for invalid options or tensors; [`Error::Device`].
    pub fn new(options: &ExchangeOptions, gradients: &[(&str, &Tensor)]) -> Result<Exchange> {
        let operation = "Exchange::new";
        for density in options.warm_up.iter().chain([&options.density]) {
            check_density(operation, *density)?;
        }
        if let FeedbackMode::Momentum(factor) = options.keep {
            check_momentum(operation, factor)?;
        }
        let Some((_, first)) = gradients.first() else {
            return Err(Error::argument(operation, "gradients", "at least one", "none"));
        };
        let mut names = BTreeSet::new();
        if let Some((name, _)) = gradients.iter().find(|(name, _)| !names.insert(*name)) {
            let expected = "unique names, because state is stored by name";
            let got = format!("two named `{name}`");
            return Err(Error::argument(operation, "gradients", expected, got));
        }
        for (name, tensor) in gradients {
            check::summable(operation, *name, tensor)?;
        }
        let stream = first.stream().clone();
        for (_, tensor) in gradients {
            stream.device().load_kernels(&gpu::sources(tensor.dtype()))?;
        }
        let parameters = gradients.iter().map(|(name, tensor)| Parameter {
            name: (*name).to_owned(),
            dtype: tensor.dtype(),
            len: tensor.numel(),
            format: tensor.format(),
        });
        let options = options.clone();
        let mut exchange = Exchange {
            options,
            stream,
            parameters: parameters.collect(),
            buckets: vec![],
            step: 0,
        };
        let tensors: Vec<&Tensor> = gradients.iter().map(|(_, tensor)| *tensor).collect();
        exchange.check(operation, &tensors)?;
        exchange.buckets = exchange.fill_buckets()?;
        Ok(exchange)
    }

    /// Number of completed steps.
    pub fn step(&self) -> u64 {
        self.step
    }

    /// Density of the next step.
    pub fn density(&self) -> f64 {
        self.density_at(self.step)
    }

    fn density_at(&self, step: u64) -> f64 {
        let stage = step / self.options.warm_up_steps.max(1);
        let warming = usize::try_from(stage).ok().and_then(|stage| self.options.warm_up.get(stage));
        warming.copied().unwrap_or(self.options.density)
    }

    /// Allocates the memory of the next exchange, so that over threads on one device
    /// [`run`](Exchange::run) only launches. Not collective; does not wait for the device.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn prepare(&mut self, comm: &Communicator) -> Result<()> {
        let density = self.density();
        for bucket in &mut self.buckets {
            let k = bucket.choose_method(&self.options, density, comm.size());
            match &mut bucket.sum {
                BucketSum::Sparse(sparse) if 0 < k && k < bucket.len => sparse.prepare(comm, k)?,
                BucketSum::Int8(int8) => int8.prepare(comm)?,
                BucketSum::Sparse(_) | BucketSum::Dense(_) => {}
            }
        }
        Ok(())
    }

    /// Exchanges the gradients in place, in the order of [`new`](Exchange::new). A bucket is summed
    /// as one sequence; tensors that are adjacent in memory form one piece of it. Waits for the
    /// device as [`Communicator`] describes; over threads on one device, not at all.
    ///
    /// # Errors
    /// The errors of [`Communicator::all_reduce`]; [`Error::BadArgument`] for tensors unlike those
    /// of [`new`](Exchange::new).
    pub fn run(&mut self, comm: &mut Communicator, gradients: &[&Tensor]) -> Result<()> {
        let result = self.try_run(comm, gradients);
        comm.broadcast_error(result)
    }

    fn try_run(&mut self, comm: &mut Communicator, gradients: &[&Tensor]) -> Result<()> {
        let operation = "Exchange::run";
        self.check(operation, gradients)?;
        comm.log_placement(operation, gradients, gradients);
        let density = self.density();
        let Exchange { options, buckets, .. } = self;
        for bucket in buckets {
            let of_bucket = bucket.members.iter().map(|(member, _)| gradients[*member]);
            let whole = Spans::new(operation, &of_bucket.collect::<Vec<_>>())?;
            let k = bucket.choose_method(options, density, comm.size());
            let (reduction, order) = (options.reduction, SumOrder::Rank);
            let sum = Sum { input: &whole, output: &whole, reduction, order };
            match &mut bucket.sum {
                BucketSum::Sparse(sparse) => {
                    let call = CollectiveCall::flat(sparse.operation(), &whole);
                    sparse.sum(comm, call, &sum, k)?;
                }
                BucketSum::Int8(int8) => int8.sum(comm, &sum)?,
                BucketSum::Dense(momentum) => {
                    let call = CollectiveCall::flat("all_reduce", &whole);
                    let velocity = momentum.as_ref().map(|momentum| momentum.advance(&whole));
                    let velocity = velocity.transpose()?;
                    let input = velocity.as_ref().unwrap_or(&whole);
                    comm.sum(call, &Sum { input, ..sum })?;
                }
            }
        }
        self.step += 1;
        self.check(operation, gradients)
    }

    /// Exports the current state. Waits for the device: once, and once more for each bucket that
    /// keeps state of Ok-Topk.
    ///
    /// # Errors
    /// [`Error::Device`].
    pub fn export(&self) -> Result<ExchangeState> {
        let mut places = Vec::new();
        let mut tensors = Vec::new();
        for bucket in &self.buckets {
            for &(parameter, start) in &bucket.members {
                let Parameter { name, len, .. } = &self.parameters[parameter];
                for (part, tensor) in bucket.kept().iter().enumerate() {
                    if let Some(tensor) = tensor {
                        places.push((name, part));
                        tensors.push(tensor.view(start, [*len])?);
                    }
                }
            }
        }
        let refs: Vec<&Tensor> = tensors.iter().collect();
        let mut kept: BTreeMap<String, ParameterState> = BTreeMap::new();
        for ((name, part), bytes) in places.into_iter().zip(meristem_device::read_back(&refs)?) {
            let entry = kept.entry(name.clone()).or_default();
            if part == 0 { entry.residual = bytes } else { entry.velocity = bytes }
        }
        for bucket in &self.buckets {
            let name = &self.parameters[bucket.members[0].0].name;
            let BucketSum::Sparse(sparse) = &bucket.sum else { continue };
            if let Some(split) = sparse.export_ok_topk()? {
                kept.entry(name.clone()).or_default().split = split;
            }
        }
        Ok(ExchangeState { step: self.step, kept })
    }

    /// Replaces the current state by another exchange's state. Parameters absent from `state` start
    /// without residual and velocity. Parameters of `state` that this exchange lacks, and state
    /// that it does not keep, are ignored.
    ///
    /// Each rank imports its own state. All ranks must import between the same two exchanges.
    /// Allocates new memory. After an error this exchange is unchanged.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for a parameter with a different number of bytes; [`Error::Device`].
    pub fn import(&mut self, comm: &Communicator, state: &ExchangeState) -> Result<()> {
        self.check_state(state)?;
        let density = self.density_at(state.step);
        let mut buckets = self.fill_buckets()?;
        for bucket in &mut buckets {
            for &(parameter, start) in &bucket.members {
                let Parameter { name, len, .. } = &self.parameters[parameter];
                let Some(kept) = state.kept.get(name) else { continue };
                for (tensor, bytes) in bucket.kept().iter().zip([&kept.residual, &kept.velocity]) {
                    if let (Some(tensor), false) = (tensor, bytes.is_empty()) {
                        upload(&tensor.view(start, [*len])?, bytes)?;
                    }
                }
            }
            // Selects the algorithm of the next step, whose thresholds and regions may be in the
            // state.
            bucket.choose_method(&self.options, density, comm.size());
            let first = &self.parameters[bucket.members[0].0].name;
            let kept = state.kept.get(first).filter(|kept| !kept.split.is_empty());
            if let (BucketSum::Sparse(sparse), Some(kept)) = (&mut bucket.sum, kept) {
                sparse.import_ok_topk(comm, &kept.split)?;
            }
        }
        (self.buckets, self.step) = (buckets, state.step);
        Ok(())
    }

    /// Checks the size of every part of the state that this exchange keeps.
    fn check_state(&self, state: &ExchangeState) -> Result<()> {
        for bucket in &self.buckets {
            for (parameter, _) in &bucket.members {
                let Parameter { name, dtype, len, .. } = &self.parameters[*parameter];
                let Some(kept) = state.kept.get(name) else { continue };
                let bytes = len * dtype.size();
                for (tensor, part) in bucket.kept().iter().zip([&kept.residual, &kept.velocity]) {
                    if tensor.is_some() && !part.is_empty() && part.len() != bytes {
                        let expected = format!("{bytes} bytes, as it is now");
                        return Err(Error::argument(
                            "Exchange::import",
                            name,
                            expected,
                            part.len(),
                        ));
                    }
                }
            }
        }
        Ok(())
    }

    /// Groups the tensors with one type and one treatment, in their order, into buckets of at most
    /// `bucket` elements; a larger tensor is alone in a bucket.
    fn fill_buckets(&self) -> Result<Vec<Bucket>> {
        let options = &self.options;
        let mut buckets: Vec<Bucket> = Vec::new();
        // Small tensors come first, in dense buckets.
        let mut groups: BTreeMap<(bool, &'static str), Vec<usize>> = BTreeMap::new();
        for (i, parameter) in self.parameters.iter().enumerate() {
            let large = parameter.len >= options.small && options.method != Method::Dense;
            let dtype = match parameter.dtype {
                DType::F32 => "f32",
                DType::F64 => "f64",
                _ => "bf16",
            };
            groups.entry((large, dtype)).or_default().push(i);
        }
        for ((large, _), members) in groups {
            let mut filled: Vec<Bucket> = Vec::new();
            for i in members {
                let Parameter { dtype, len, .. } = self.parameters[i];
                if filled.last().is_none_or(|bucket| bucket.len + len > options.bucket) {
                    filled.push(Bucket::new(dtype));
                }
                if let Some(bucket) = filled.last_mut() {
                    bucket.members.push((i, bucket.len));
                    bucket.len += len;
                }
            }
            for mut bucket in filled {
                self.equip(&mut bucket, large)?;
                buckets.push(bucket);
            }
        }
        Ok(buckets)
    }

    /// Allocates the memory of a bucket.
    fn equip(&self, bucket: &mut Bucket, large: bool) -> Result<()> {
        let ExchangeOptions { method, keep, .. } = self.options;
        let (stream, dtype, len) = (&self.stream, bucket.dtype, bucket.len);
        bucket.sum = match (large, method, keep) {
            (true, Method::Int8, _) => BucketSum::Int8(Int8Sum::new(stream, dtype, len, keep)?),
            (true, Method::Sparse(sparse), _) => {
                BucketSum::Sparse(SparseSum::with_len(stream, dtype, len, sparse, keep)?)
            }
            (true, _, _) => {
                let sparse = SparseMethod::TopK;
                BucketSum::Sparse(SparseSum::with_len(stream, dtype, len, sparse, keep)?)
            }
            (false, _, FeedbackMode::Momentum(factor)) => {
                BucketSum::Dense(Some(Momentum::new(stream, dtype, len, factor)?))
            }
            (false, ..) => BucketSum::Dense(None),
        };
        Ok(())
    }

    fn check(&self, operation: &'static str, gradients: &[&Tensor]) -> Result<()> {
        if gradients.len() != self.parameters.len() {
            let expected = format!("{} tensors", self.parameters.len());
            return Err(Error::argument(operation, "gradients", expected, gradients.len()));
        }
        let expect = Expect::stream(&self.stream);
        for (Parameter { name, dtype, len, format }, tensor) in
            self.parameters.iter().zip(gradients)
        {
            expect.clone().dtype(*dtype).format(*format).check(operation, name, tensor)?;
            if tensor.numel() != *len {
                let expected = format!("of {len} elements");
                return Err(Error::argument(operation, name, expected, tensor.numel()));
            }
        }
        Ok(())
    }
}

impl Bucket {
    fn new(dtype: DType) -> Bucket {
        Bucket { members: Vec::new(), len: 0, dtype, sum: BucketSum::Dense(None) }
    }

    /// Residual and velocity.
    fn kept(&self) -> [Option<&Tensor>; 2] {
        match &self.sum {
            BucketSum::Sparse(sparse) => [sparse.residual(), sparse.velocity()],
            BucketSum::Int8(Int8Sum { feedback, .. }) => {
                [Some(&feedback.residual), feedback.velocity()]
            }
            BucketSum::Dense(momentum) => {
                [None, momentum.as_ref().map(|momentum| &momentum.velocity)]
            }
        }
    }

    /// Switches a sparse bucket to the fastest algorithm for this step if the method is
    /// [`Method::Auto`]. Returns the number of elements that each rank sends, which is all elements
    /// if the dense sum is the fastest. For a dense or int8 bucket the number has no meaning.
    fn choose_method(&mut self, options: &ExchangeOptions, density: f64, ranks: usize) -> usize {
        let k = options.k.map_or(picks(density, self.len), |k| k.min(self.len));
        let BucketSum::Sparse(sparse) = &mut self.sum else { return k };
        if options.method != Method::Auto {
            return k;
        }
        match options.table.choose(ranks, self.len, k, self.dtype) {
            Some(method) => {
                sparse.switch(method);
                k
            }
            None => self.len,
        }
    }
}

/// Copies bytes to a tensor of the same size.
pub(crate) fn upload(tensor: &Tensor, bytes: &[u8]) -> Result<()> {
    let size = tensor.dtype().size();
    with_number!(tensor.dtype(), T => {
        let elements: Vec<T> = bytes.chunks_exact(size).map(bytemuck::pod_read_unaligned).collect();
        tensor.copy_from_slice(&elements)?;
    }, unreachable!("checked when the exchange was made"));
    Ok(())
}
