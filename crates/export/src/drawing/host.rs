//! Drawing of a host and its modules.

use meristem_grow::{HostSpec, Stage};

use super::colours::stage_hue;
use super::parts::{PartKind, host_parts};
use super::picture::{Anchor, Colour, Picture, Shape, short, text};

/// A slot in the drawing of a host.
#[derive(Clone, Debug)]
pub struct DrawnSlot {
    /// Name of the slot.
    pub slot: String,
    /// Stage; `None` for a stage that this version does not know.
    pub stage: Option<Stage>,
    /// Text below the name: the blueprint of the module, or the stage.
    pub text: String,
}

/// Width and height of a box of the host.
const BOX: [f64; 2] = [86.0, 46.0];
/// Distance between the centres of neighbouring boxes.
const STEP: f64 = 110.0;
/// Distance of the boxes from the upper edge of the picture, without the lines of nested branches.
const EDGE: f64 = 27.0;
/// Distance between the lines of branches that are nested in each other.
const BRANCH: f64 = 10.0;

/// The drawing of a host from the image to the classes, with a box for each of its [`host_parts`],
/// and lines above the boxes for branches. A slot of `slots` has the colour of its stage, and its
/// text below.
pub fn topology(host: &HostSpec, slots: &[DrawnSlot]) -> Picture {
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
                // The ends of the line are beside the centres of the boxes: the line of another
                // branch may end on the other side of a centre.
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
                    let hue = slot.stage.and_then(stage_hue);
                    fill = Some(hue.map_or(Colour::Grid, |hue| Colour::Rgb(hue.rgb())));
                    below.push(slot.text.clone());
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
    fn a_host_is_drawn_with_all_its_slots() {
        let host: HostSpec = "cnn:channels=2,blocks=3,pools=2".parse().unwrap();
        let grown = DrawnSlot {
            slot: "r0c1".into(),
            stage: Some(Stage::Fossilized),
            text: "conv_light".into(),
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
