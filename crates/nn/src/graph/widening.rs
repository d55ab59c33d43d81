//! Parameters of a wider network, made from the parameters of a narrower network.
//!
//! Both graphs have the same nodes; some layers of the wider one have more output features. The
//! features of every node are traced from input to output: each feature of the wider network is a
//! feature of the narrower one, a copy of one, or new. The parameters follow:
//!
//! ```text
//! layer that became wider     W' = rows of W, then a row for each further feature
//! layer that reads it         V'[:, j] = share_j · V[:, origin of j], 0 for a new feature j
//! batch norm between          γ, β and running statistics of each feature's origin
//! ```
//!
//! The shares of a feature and of its copies add up to 1, so the function is the same.

use std::collections::HashMap;

use meristem_device::random::Rng;

use super::{Graph, NodeId, NodeOp, ParamId, WidthInit};
use crate::error::{Error, Result};

/// A feature of a value in the wider network.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Feature {
    /// Feature of the narrower network; `None` for a new one.
    origin: Option<usize>,
    /// Factor of the weights with which a layer reads it.
    share: f32,
}

impl Feature {
    const NEW: Self = Self { origin: None, share: 0.0 };

    fn kept(origin: usize) -> Self {
        Self { origin: Some(origin), share: 1.0 }
    }
}

/// All features of a value, in order.
type Features = Vec<Feature>;

fn unchanged(features: usize) -> Features {
    (0..features).map(Feature::kept).collect()
}

/// Origins of a tensor's rows (first dimension) and columns (second dimension).
#[derive(Clone, Debug)]
pub(crate) struct TensorOrigin {
    rows: Features,
    columns: Features,
}

impl TensorOrigin {
    /// Elements of a parameter or buffer in the wider network. `old` has the elements in the
    /// narrower network, `new` the initial elements of a new tensor.
    pub(crate) fn weights(&self, old: &[f32], new: Vec<f32>) -> Vec<f32> {
        self.values(old, new, |_, column| column)
    }

    /// State of an optimiser in the wider network; 0 for new elements. An average of gradients is
    /// scaled like the weights, so that the next steps change the function as before. An average of
    /// squared gradients becomes the value that the wider network would have measured: the gradient
    /// of a copy's incoming weights is the original's gradient times the copy's share, and the
    /// gradient of its outgoing weights equals the original's.
    pub(crate) fn moments(&self, old: &[f32], len: usize, squared: bool) -> Vec<f32> {
        let factor = |row: f32, column: f32| if squared { row * row } else { column };
        self.values(old, vec![0.0; len], factor)
    }

    /// Elements of the further rows of a tensor, row by row.
    pub(crate) fn further_rows<T: Copy>(&self, wide: &[T]) -> Vec<T> {
        let row = wide.len() / self.rows.len().max(1);
        self.further_of(&self.rows).flat_map(|at| &wide[at * row..][..row]).copied().collect()
    }

    /// Sets the further rows of a tensor.
    pub(crate) fn set_further_rows(&self, wide: &mut [f32], values: &[f32]) {
        let row = wide.len() / self.rows.len().max(1);
        for (at, values) in self.further_of(&self.rows).zip(values.chunks_exact(row.max(1))) {
            wide[at * row..][..row].copy_from_slice(values);
        }
    }

    /// Elements of the further columns of a tensor: `[columns][rows][kernel]`.
    pub(crate) fn further_columns<T: Copy>(&self, wide: &[T]) -> Vec<T> {
        self.column_elements(wide.len()).map(|at| wide[at]).collect()
    }

    /// Sets the further columns of a tensor, in the order of [`Self::further_columns`].
    pub(crate) fn set_further_columns(&self, wide: &mut [f32], values: &[f32]) {
        for (at, value) in self.column_elements(wide.len()).zip(values) {
            wide[at] = *value;
        }
    }

    /// Numbers of further rows and further columns.
    pub(crate) fn further(&self) -> (usize, usize) {
        (self.further_of(&self.rows).count(), self.further_of(&self.columns).count())
    }

    /// Number of columns.
    pub(crate) fn columns(&self) -> usize {
        self.columns.len()
    }

    /// Positions of the elements of the further columns of a tensor of `len` elements.
    fn column_elements(&self, len: usize) -> impl Iterator<Item = usize> {
        let (rows, columns) = (self.rows.len(), self.columns.len());
        let kernel = len / (rows * columns).max(1);
        self.further_of(&self.columns).flat_map(move |column| {
            (0..rows).flat_map(move |row| {
                let start = (row * columns + column) * kernel;
                start..start + kernel
            })
        })
    }

    /// Positions of the new features, which are the further rows or columns. Copies of earlier
    /// features are not among them.
    fn further_of<'f>(&self, features: &'f Features) -> impl Iterator<Item = usize> + use<'f> {
        (0..features.len()).filter(|at| features[*at].origin.is_none())
    }

    /// The elements of the wider tensor. `factor` returns the factor of an old element from the
    /// shares of its row and its column.
    fn values(&self, old: &[f32], mut new: Vec<f32>, factor: impl Fn(f32, f32) -> f32) -> Vec<f32> {
        let kernel = new.len() / (self.rows.len() * self.columns.len()).max(1);
        // Every feature of the narrower network is still there.
        let origins = self.columns.iter().filter_map(|column| column.origin);
        let old_columns = origins.max().map_or(0, |last| last + 1);
        let mut kernels = new.chunks_mut(kernel.max(1));
        for row in &self.rows {
            for (column, to) in self.columns.iter().zip(&mut kernels) {
                match (row.origin, column.origin) {
                    (None, _) => {}
                    (Some(_), None) => to.fill(0.0),
                    (Some(origin), Some(at)) => {
                        let start = (origin * old_columns + at) * kernel;
                        let factor = factor(row.share, column.share);
                        let from = &old[start..start + kernel];
                        to.iter_mut().zip(from).for_each(|(to, from)| *to = factor * from);
                    }
                }
            }
        }
        new
    }
}

/// Origins of all parameters and buffers that differ between two graphs, by name.
#[derive(Debug, Default)]
pub(crate) struct Widening(HashMap<String, TensorOrigin>);

impl Widening {
    /// Traces features from `from` to `to`. `random` returns the generator with a name.
    ///
    /// # Errors
    /// [`Error::Argument`] if the graphs differ in more than features, or if an operation that
    /// mixes features gets further ones.
    pub(crate) fn new(
        from: &Graph,
        to: &Graph,
        init: WidthInit,
        random: &dyn Fn(&str) -> Rng,
    ) -> Result<Self> {
        Trace { from, to, init, random, features: vec![], origins: HashMap::new() }.run()
    }

    /// Origin of a tensor; `None` for one that stays as it is.
    pub(crate) fn origin(&self, name: &str) -> Option<&TensorOrigin> {
        self.0.get(name)
    }

    /// All tensors that change, with their origins.
    pub(crate) fn origins(&self) -> impl Iterator<Item = (&str, &TensorOrigin)> {
        self.0.iter().map(|(name, origin)| (name.as_str(), origin))
    }
}

/// The features of the nodes so far.
struct Trace<'g> {
    from: &'g Graph,
    to: &'g Graph,
    init: WidthInit,
    random: &'g dyn Fn(&str) -> Rng,
    /// Features of each node, in order.
    features: Vec<Features>,
    origins: HashMap<String, TensorOrigin>,
}

impl Trace<'_> {
    fn run(mut self) -> Result<Widening> {
        let (from, to) = (self.from, self.to);
        let kinds = |graph: &Graph| {
            graph.nodes.iter().map(|node| std::mem::discriminant(&node.op)).collect::<Vec<_>>()
        };
        let names =
            |graph: &Graph| graph.params.iter().map(|param| param.name.clone()).collect::<Vec<_>>();
        if kinds(from) != kinds(to) || names(from) != names(to) {
            return Err(refused("the same layers with more features", "other layers"));
        }
        for index in 0..to.nodes.len() {
            let features = self.node(index)?;
            let (expected, got) = (to.nodes[index].dims.c, features.len());
            if expected != got {
                return Err(refused(
                    format!("{expected} features of node {index}"),
                    format!("{got} features"),
                ));
            }
            self.features.push(features);
        }
        if self.features[to.output.0] != unchanged(from.classes()) {
            return Err(refused("the same outputs", "more outputs"));
        }
        Ok(Widening(self.origins))
    }

    /// Features of a node, whose parameters are recorded.
    fn node(&mut self, index: usize) -> Result<Features> {
        let (narrow, wide) = (&self.from.nodes[index], &self.to.nodes[index]);
        let of = |node: NodeId| self.features[node.0].clone();
        Ok(match wide.op {
            NodeOp::Conv2d { x, weight, bias, geometry } => {
                let columns = of(x);
                let depthwise = geometry.groups > 1 && geometry.groups == columns.len();
                let rows = match (depthwise, geometry.groups) {
                    (true, _) if wide.dims.c == columns.len() => columns.clone(),
                    (false, 1) => self.further(weight, narrow.dims.c, wide.dims.c),
                    _ => self.only_unchanged(index)?,
                };
                let columns =
                    if geometry.groups == 1 { columns } else { per_group(self.to, weight) };
                self.note_param(weight, &rows, columns);
                if let Some(bias) = bias {
                    self.note_param(bias, &rows, unchanged(1));
                }
                rows
            }
            NodeOp::BatchNorm { x, weight, bias, running, .. } => {
                let rows = of(x);
                self.note_param(weight, &rows, unchanged(1));
                self.note_param(bias, &rows, unchanged(1));
                for buffer in running {
                    let name = self.to.buffers[buffer.0].name.clone();
                    self.note(name, narrow.dims.c, &rows, unchanged(1));
                }
                rows
            }
            NodeOp::Activation(_, x)
            | NodeOp::MaxPool2d { x, .. }
            | NodeOp::AvgPool2d { x, .. }
            | NodeOp::GlobalAvgPool(x)
            | NodeOp::Dropout { x, .. }
            | NodeOp::Detach(x) => of(x),
            NodeOp::Flatten(x) => {
                let pixels = self.to.nodes[x.0].dims.h * self.to.nodes[x.0].dims.w;
                let spread = |Feature { origin, share }: Feature| {
                    (0..pixels).map(move |p| Feature {
                        origin: origin.map(|origin| origin * pixels + p),
                        share,
                    })
                };
                of(x).into_iter().flat_map(spread).collect()
            }
            NodeOp::Concat(ref parts) => {
                let mut before = 0;
                let mut all = vec![];
                for part in parts {
                    let moved = of(*part).into_iter().map(|Feature { origin, share }| Feature {
                        origin: origin.map(|origin| before + origin),
                        share,
                    });
                    all.extend(moved);
                    before += self.from.nodes[part.0].dims.c;
                }
                all
            }
            NodeOp::Add(a, b) | NodeOp::Multiply(a, b) if of(a) == of(b) => of(a),
            _ => self.only_unchanged(index)?,
        })
    }

    /// The features of a layer with more of them.
    fn further(&self, weight: ParamId, from: usize, to: usize) -> Features {
        let mut features = unchanged(from);
        let name = &self.to.params[weight.0].name;
        let mut random = (self.random)(&format!("{name} with {to} features"));
        for _ in from..to {
            let further = match self.init {
                WidthInit::Zero
                | WidthInit::Firefly
                | WidthInit::Gradmax
                | WidthInit::Tiny
                | WidthInit::VarianceTransfer => Feature::NEW,
                WidthInit::Net2wider => {
                    let copied = random.below(from as u32) as usize;
                    // Equal shares would give equal gradients for ever.
                    let part = 0.4 + 0.2 * random.uniform();
                    let share = features[copied].share * part;
                    features[copied].share -= share;
                    Feature { origin: Some(copied), share }
                }
            };
            features.push(further);
        }
        features
    }

    /// The features of a node that allows no further ones, because it mixes features or combines
    /// several inputs. Refuses the node if it or one of its inputs has other features than in the
    /// narrower network.
    fn only_unchanged(&self, index: usize) -> Result<Features> {
        let (narrow, wide) = (&self.from.nodes[index], &self.to.nodes[index]);
        let inputs = wide.op.inputs();
        let same =
            |node: &NodeId| self.features[node.0] == unchanged(self.from.nodes[node.0].dims.c);
        if narrow.dims == wide.dims && inputs.iter().all(same) {
            return Ok(unchanged(narrow.dims.c));
        }
        Err(refused(
            "further features only where each feature is computed by itself",
            format!("node {index} with further features"),
        ))
    }

    fn note_param(&mut self, param: ParamId, rows: &Features, columns: Features) {
        let spec = &self.from.params[param.0];
        let (name, old_rows) = (spec.name.clone(), spec.shape.first().copied().unwrap_or(1));
        self.note(name, old_rows, rows, columns);
    }

    /// Records the origin of a tensor, if that changes.
    fn note(&mut self, name: String, old_rows: usize, rows: &Features, columns: Features) {
        if *rows != unchanged(old_rows) || columns != unchanged(columns.len()) {
            self.origins.insert(name, TensorOrigin { rows: rows.clone(), columns });
        }
    }
}

/// Columns of a grouped convolution, which do not change.
fn per_group(graph: &Graph, weight: ParamId) -> Features {
    unchanged(graph.params[weight.0].shape.get(1).copied().unwrap_or(1))
}

fn refused(expected: impl Into<String>, got: impl ToString) -> Error {
    Error::argument("widen", "graph", expected, got)
}
