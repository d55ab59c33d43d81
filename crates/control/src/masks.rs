//! Masks of the legal choices of every head, and the position of each head in a row.

use meristem_grow::Host;

use crate::action::{ActionOp, Choices};
use crate::heads::{HEADS, HeadKind};
use crate::rules::{legal_blueprints, legal_slots};
use crate::view::EnvView;
use crate::widening::{self, LayerWidening};

/// Number of heads.
pub const HEAD_COUNT: usize = HEADS.len();

/// Positions of the heads' choices in a row of logits, probabilities or mask: the heads follow each
/// other in the order of [`HEADS`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadLayout {
    sizes: [usize; HEAD_COUNT],
    offsets: [usize; HEAD_COUNT],
    total: usize,
    /// Number of layers. They are the last choices of the slot head.
    layers: usize,
}

impl HeadLayout {
    /// The layout for hosts with `slots` enabled slots and `blueprints` blueprints.
    pub fn new(slots: usize, blueprints: usize) -> Self {
        Self::of_sizes(HEADS.map(|head| head.size.choices(slots, blueprints)))
    }

    /// The layout with WIDEN, for hosts with `layers` layers that can become wider: the op head has
    /// this further choice, and the slot head one for each layer, after the slots.
    pub fn with_layers(self, layers: usize) -> Self {
        let mut sizes = self.sizes;
        sizes[HeadKind::Op as usize] = ActionOp::ALL.len();
        sizes[HeadKind::Slot as usize] += layers;
        Self { layers, ..Self::of_sizes(sizes) }
    }

    fn of_sizes(sizes: [usize; HEAD_COUNT]) -> Self {
        let mut offsets = [0; HEAD_COUNT];
        let mut total = 0;
        for (offset, size) in offsets.iter_mut().zip(sizes) {
            *offset = total;
            total += size;
        }
        Self { sizes, offsets, total, layers: 0 }
    }

    /// Number of choices of each head.
    pub fn sizes(&self) -> [usize; HEAD_COUNT] {
        self.sizes
    }

    /// Length of a row: the choices of all heads.
    pub fn total(&self) -> usize {
        self.total
    }

    /// The range of a head in a row.
    pub fn range(&self, head: usize) -> std::ops::Range<usize> {
        self.offsets[head]..self.offsets[head] + self.sizes[head]
    }
}

/// Legal ops of one env, the legal slots of each op, the blueprints that may germinate in each
/// slot, and the layers that may become wider.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Legality {
    slots: [Vec<bool>; ActionOp::OF_HEAD.len()], // [op][slot]
    blueprints: Vec<Vec<bool>>,                  // [slot][blueprint]
    layers: Vec<bool>,                           // empty unless a policy observes layers
}

impl Legality {
    /// Legality in the host's current state, without WIDEN.
    pub fn from_host(host: &Host) -> Self {
        let blueprints = |slot| legal_blueprints(slot, host).collect();
        let blueprints: Vec<Vec<bool>> = (0..host.slots().len()).map(blueprints).collect();
        let slots = ActionOp::OF_HEAD.map(|op| match op {
            // `legal_slots` would compare every blueprint with the size limits a second time.
            ActionOp::Germinate => blueprints.iter().map(|all| all.contains(&true)).collect(),
            op => legal_slots(op, host),
        });
        Self { slots, blueprints, layers: vec![] }
    }

    /// Legality for a policy that observes layers: with WIDEN by [`crate::EnvFacts::widen_by`], in
    /// the layers in which the host and the env permit it.
    pub fn with_layers(view: &EnvView<'_>) -> Self {
        Self::with_widenings(view.host, &widening::widenings(view))
    }

    /// [`Legality::with_layers`] for changes of width that are known.
    pub(crate) fn with_widenings(host: &Host, widenings: &[LayerWidening]) -> Self {
        let layers = widenings.iter().map(|widening| widening.legal).collect();
        Self { layers, ..Self::from_host(host) }
    }

    /// Whether an op of the op head is legal. WAIT always is; WIDEN needs a legal layer, any other
    /// op a legal slot.
    pub fn op(&self, op: ActionOp) -> bool {
        let places = if op == ActionOp::Widen { &self.layers[..] } else { self.slots(op) };
        op == ActionOp::Wait || places.contains(&true)
    }

    /// Whether an op is legal in each slot; all false for WAIT, empty for WIDEN.
    pub fn slots(&self, op: ActionOp) -> &[bool] {
        self.slots.get(op.index()).map_or(&[], Vec::as_slice)
    }

    /// Blueprints that may germinate in a slot.
    pub(crate) fn blueprints(&self, slot: usize) -> &[bool] {
        self.blueprints.get(slot).map_or(&[], Vec::as_slice)
    }

    /// Writes the legality of each slot as bit masks of `words` words for the sampling kernel. The
    /// first word of a slot holds the legal ops, op i in bit i. The following words hold the
    /// blueprints that may germinate in the slot. In places beyond the slots nothing is legal.
    ///
    /// # Panics
    /// If `words` is too small for the ops and the blueprints.
    pub fn write_places(&self, words: usize, places: &mut [u32]) {
        places.fill(0);
        let slots = places.chunks_exact_mut(words.max(1)).zip(&self.blueprints).enumerate();
        for (slot, (words, blueprints)) in slots {
            let is = |op: &&ActionOp| self.slots(**op).get(slot).is_some_and(|legal| *legal);
            ActionOp::OF_HEAD.iter().filter(is).for_each(|op| words[0] |= 1 << op.index());
            let legal = blueprints.iter().enumerate().filter(|(_, legal)| **legal);
            legal.for_each(|(b, _)| words[1 + b / 32] |= 1 << (b % 32));
        }
    }

    /// Writes the legality of each layer as [`Legality::write_places`] does that of each slot. The
    /// first word of a layer has only the bit of WIDEN, and the following words are 0.
    pub fn write_layers(&self, words: usize, places: &mut [u32]) {
        places.fill(0);
        let layers = places.chunks_exact_mut(words.max(1)).zip(&self.layers);
        layers.filter(|(_, legal)| **legal).for_each(|(words, _)| {
            words[0] = 1 << ActionOp::Widen.index();
        });
    }

    /// Writes the mask of the op head into its range of the row `mask`, `[layout.total()]`: 1 for a
    /// legal op, 0 otherwise.
    pub fn write_ops(&self, layout: &HeadLayout, mask: &mut [u8]) {
        let ops = &mut mask[layout.range(HeadKind::Op as usize)];
        ops.iter_mut().zip(ActionOp::ALL).for_each(|(legal, op)| *legal = u8::from(self.op(op)));
    }

    /// Writes the masks of all heads into the row `mask`, `[layout.total()]`, under the given
    /// choices of op and slot.
    pub fn write_all(&self, layout: &HeadLayout, choices: &Choices, mask: &mut [u8]) {
        self.write_ops(layout, mask);
        let [op, slot, ..] = *choices;
        for head in 1..HEAD_COUNT {
            self.write_part(layout, head, (ActionOp::ALL[op], slot), mask);
        }
    }

    /// Writes the mask of a head other than the op head into its range of the row `mask`, as
    /// [`Legality::write_head`] does. Under WIDEN the slot head has the layers, after the slots.
    pub(crate) fn write_part(
        &self,
        layout: &HeadLayout,
        head: usize,
        (op, slot): (ActionOp, usize),
        mask: &mut [u8],
    ) {
        let part = &mut mask[layout.range(head)];
        part.fill(0);
        if op == ActionOp::Widen && HEADS[head].kind == HeadKind::Slot {
            let slots = part.len() - layout.layers;
            let layers = part[slots..].iter_mut().zip(&self.layers);
            layers.for_each(|(choice, legal)| *choice = u8::from(*legal));
        } else {
            self.write_head(head, (op, slot), part);
        }
    }

    /// Writes the mask of a head other than the op head into `part`, `[choices of the head]`, under
    /// the given op and slot. The slot head has the legal slots of the op; `slot` is ignored then.
    /// The blueprint head has the blueprints that may germinate in the slot. A head that the op
    /// does not use is pinned to choice 0; all other heads are free. A head with one legal choice
    /// has log-probability and entropy 0.
    pub fn write_head(&self, head: usize, (op, slot): (ActionOp, usize), part: &mut [u8]) {
        let head = &HEADS[head];
        let free = vec![true; part.len()];
        let legal = match head.kind {
            _ if !head.is_used_by(op) => {
                part.iter_mut().enumerate().for_each(|(i, choice)| *choice = u8::from(i == 0));
                return;
            }
            HeadKind::Slot => self.slots(op),
            HeadKind::Blueprint => self.blueprints.get(slot).unwrap_or(&free),
            _ => &free,
        };
        part.iter_mut().zip(legal).for_each(|(choice, legal)| *choice = u8::from(*legal));
    }
}
