//! Drawings of the stages of slots: over the steps, and in the host.

use meristem::grow::{HostLayer, HostSpec, Stage};
use meristem::train::events::Recorded;
use meristem::train::reading::Span;

use super::axis::{Axis, Field, x_ticks};
use super::{Anchor, Colour, Picture, Shape, short, text};
use crate::colours;
use crate::host_parts::{PartKind, host_parts};

/// Stages with or after a module, in the order of the legend.
const STAGES: &[Stage] = Stage::ALL.split_at(1).1;

/// Maximum number of rows of a chart; further slots are omitted.
const ROWS_MAX: usize = 64;

/// Minimum distance in pixels between the starts of two bars of a row. It limits the size of a
/// picture of a long run.
const PIXELS_MIN: f64 = 0.25;

/// Colour of a stage; the colour of the grid for an unknown stage.
fn stage_colour(stage: &Recorded<Stage>) -> Colour {
    let hue = stage.known().and_then(colours::stage);
    hue.map_or(Colour::Grid, |hue| Colour::Rgb(hue.rgb))
}

/// Draws slots over steps, with stages as coloured bars; `None` without spans. The rows are in the
/// forward order of the host, after any slots that the host does not have.
pub(crate) fn lifecycle(spans: &[Span], host: Option<&HostSpec>) -> Option<Picture> {
    let layers = host.iter().flat_map(|host| host.all_layers());
    let forward: Vec<&str> = layers.filter_map(HostLayer::slot).map(|slot| slot.as_str()).collect();
    let mut slots: Vec<&str> = spans.iter().map(|span| span.slot.as_str()).collect();
    slots.sort_by_key(|name| (forward.iter().position(|slot| slot == name), *name));
    slots.dedup();
    slots.truncate(ROWS_MAX);
    let rows = slots.len().max(STAGES.len());
    let size = [720.0, 70.0 + 24.0 * rows as f64];
    let field: Field = [70.0, 10.0, size[0] - 160.0, size[1] - 60.0];
    let [left, top, right, bottom] = field;
    let ends = spans.iter().flat_map(|span| [span.from as f64, span.to as f64]);
    spans.first()?;
    let x = Axis::of(ends.chain([0.0]), [left, right]);
    let mut shapes = x_ticks(&x, field);
    for (row, slot) in slots.iter().enumerate() {
        let height = top + 12.0 + 24.0 * row as f64;
        shapes.push(text([left - 8.0, height], Anchor::End, short(slot, 8)));
        let mut drawn = f64::NEG_INFINITY;
        for span in spans.iter().filter(|span| span.slot == **slot) {
            let (from, to) = (x.at(span.from as f64), x.at(span.to as f64));
            if to < drawn + PIXELS_MIN {
                continue;
            }
            drawn = to;
            let colour = stage_colour(&span.stage);
            shapes.push(Shape::Area { from: [from, height - 9.0], to: [to, height + 9.0], colour });
        }
    }
    let middle = (left + right) / 2.0;
    shapes.push(text([middle, bottom + 40.0], Anchor::Middle, "step".into()));
    for (row, stage) in STAGES.iter().enumerate() {
        let height = top + 12.0 + 24.0 * row as f64;
        let (from, to) = ([right + 16.0, height - 7.0], [right + 34.0, height + 7.0]);
        shapes.push(Shape::Area { from, to, colour: stage_colour(&(*stage).into()) });
        shapes.push(text([right + 42.0, height], Anchor::Start, stage.to_string()));
    }
    Some(Picture { size, shapes })
}

/// A slot in the drawing of a host.
#[derive(Clone, Debug)]
pub(crate) struct DrawnSlot {
    pub(crate) slot: String,
    pub(crate) stage: Recorded<Stage>,
    pub(crate) blueprint: Option<String>,
}

/// Width and height of a box of the host.
const BOX: [f64; 2] = [86.0, 46.0];
/// Distance between the centres of neighbouring boxes.
const STEP: f64 = 110.0;
/// Distance of the topmost line of a branch from the edge of the picture.
const EDGE: f64 = 27.0;
/// Distance between the lines of branches that are nested in each other.
const BRANCH: f64 = 10.0;

/// Draws the host from the image to the classes, with a box for each block, pool and slot, and
/// lines above the boxes for branches. A slot with a module has the colour of its stage, with the
/// blueprint below.
pub(crate) fn topology(host: &HostSpec, slots: &[DrawnSlot]) -> Picture {
    let parts = host_parts(host);
    let deepest = parts.iter().map(|part| part.depth).max().unwrap_or(0);
    let middle = EDGE + BRANCH * deepest as f64 + BOX[1] / 2.0;
    let at = |part: usize| 60.0 + STEP * part as f64;
    let mut shapes = vec![];
    for (number, part) in parts.iter().enumerate() {
        let centre = at(number);
        for &input in &part.inputs {
            let half = BOX[0] / 2.0;
            if input + 1 == number {
                let (from, to) = ([at(input) + half, middle], [centre - half, middle]);
                shapes.push(Shape::Line { from, to, colour: Colour::Ink });
            } else {
                let top = middle - BOX[1] / 2.0;
                let above = top - BRANCH * (deepest - parts[input].depth) as f64 - 7.0;
                // Beside the corner at which another branch may end.
                let [from, to] = [at(input) + half / 2.0, centre - half / 2.0];
                let points = vec![[from, top], [from, above], [to, above], [to, top]];
                shapes.push(Shape::Path { points, colour: Colour::Ink });
            }
        }
        let [from, to] = [-0.5, 0.5].map(|s| [centre + s * BOX[0], middle + s * BOX[1]]);
        let (mut lines, mut fill, mut below) = (vec![], None, vec![]);
        match &part.kind {
            PartKind::Layers(text) => lines.clone_from(text),
            // The name is below the coloured box, in the page's text colour.
            PartKind::Slot(name) => {
                below.push(name.to_string());
                if let Some(slot) = slots.iter().find(|slot| slot.slot == name.as_str()) {
                    fill = Some(stage_colour(&slot.stage));
                    below.push(slot.blueprint.clone().unwrap_or(slot.stage.to_string()));
                }
            }
        }
        if let Some(colour) = fill {
            shapes.push(Shape::Area { from, to, colour });
        }
        let corners = vec![from, [to[0], from[1]], to, [from[0], to[1]], from];
        shapes.push(Shape::Path { points: corners, colour: Colour::Ink });
        for (line, height) in lines.into_iter().zip([-9.0, 9.0]) {
            shapes.push(text([centre, middle + height], Anchor::Middle, line));
        }
        for (line, height) in below.into_iter().zip([38.0, 56.0]) {
            shapes.push(text([centre, middle + height], Anchor::Middle, short(&line, 13)));
        }
    }
    let width = 120.0 + STEP * parts.len().saturating_sub(1) as f64;
    Picture { size: [width, middle + 75.0], shapes }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_slots_in_forward_order() {
        let span = |slot: &str| Span {
            slot: slot.into(),
            stage: Stage::Training.into(),
            blueprint: None,
            from: 2,
            to: 5,
        };
        let host: HostSpec = "baseline".parse().unwrap();
        let spans = [span("r0c1"), span("r1c0"), span("r0c0")];
        let picture = lifecycle(&spans, Some(&host)).unwrap();
        let rows = picture.shapes.iter().filter_map(|shape| match shape {
            Shape::Text { text, anchor: Anchor::End, .. } => Some(text.as_str()),
            _ => None,
        });
        assert_eq!(rows.collect::<Vec<_>>(), ["r0c0", "r1c0", "r0c1"]);
        let short = |from| Span { from, to: from + 1, ..span("r0c0") };
        let many: Vec<Span> = (0..100_000).map(short).collect();
        let areas = lifecycle(&many, None).unwrap().shapes.len();
        assert!((490 * 3..490 * 4 + 100).contains(&areas), "{areas}");
        assert!(lifecycle(&[], Some(&host)).is_none());
    }

    #[test]
    fn a_host_is_drawn_with_all_its_slots() {
        let host: HostSpec = "cnn:channels=2,blocks=3,pools=2".parse().unwrap();
        let grown = DrawnSlot {
            slot: "r0c1".into(),
            stage: Stage::Fossilized.into(),
            blueprint: Some("conv_light".into()),
        };
        let picture = topology(&host, &[grown]);
        let has = |wanted: &str| {
            let of = |shape: &&Shape| matches!(shape, Shape::Text { text, .. } if text == wanted);
            picture.shapes.iter().filter(of).count()
        };
        for (wanted, count) in [("pool 2×2", 2), ("r1c2", 1), ("conv_light", 1), ("8 channels", 1)]
        {
            assert_eq!(has(wanted), count, "{wanted}");
        }
    }
}
