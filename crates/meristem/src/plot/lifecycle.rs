//! Drawing of the stages of slots over the steps.

use meristem::export::drawing::stage_hue;
use meristem::grow::{HostLayer, HostSpec, Stage};
use meristem::train::events::Recorded;
use meristem::train::reading::Span;

use super::axis::{Axis, Field, x_ticks};
use super::{Anchor, Colour, Picture, Shape, short, text};

/// Stages with or after a module, in the order of the legend.
const STAGES: &[Stage] = Stage::ALL.split_at(1).1;

/// Maximum number of rows of a chart; further slots are omitted.
const ROWS_MAX: usize = 64;

/// Minimum distance in pixels between the ends of two bars of a row; a bar that ends closer is left
/// out. It limits the size of a picture of a long run.
const PIXELS_MIN: f64 = 0.25;

/// Colour of a stage; the colour of the grid for an unknown stage.
fn stage_colour(stage: &Recorded<Stage>) -> Colour {
    let hue = stage.known().and_then(stage_hue);
    hue.map_or(Colour::Grid, |hue| Colour::Rgb(hue.rgb()))
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
}
