//! Encoder of shapes as SVG.

use super::colours::css;
use super::picture::{Anchor, Colour, Picture, Shape};

/// Colours of ink and grid on a page.
struct Palette {
    ink: &'static str,
    grid: &'static str,
}

/// Encodes a file with a white background.
pub fn svg(picture: &Picture) -> String {
    let [width, height] = picture.size;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"14\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    elements(picture, &Palette { ink: "#3c3c3c", grid: "#e1e1e1" }, &mut text);
    text.push_str("</svg>\n");
    text
}

/// Encodes a part of an HTML page, with the page's text colour and `--grid`. `label` is the
/// description for screen readers.
pub fn inline_svg(picture: &Picture, label: &str) -> String {
    let [width, height] = picture.size;
    let mut text = format!(
        "<svg role=\"img\" width=\"{width}\" viewBox=\"0 0 {width} {height}\" \
         font-size=\"14\"><title>{}</title>\n",
        escaped(label)
    );
    elements(picture, &Palette { ink: "currentColor", grid: "var(--grid)" }, &mut text);
    text.push_str("</svg>\n");
    text
}

fn elements(picture: &Picture, palette: &Palette, to: &mut String) {
    for shape in &picture.shapes {
        to.push_str(&element(shape, palette));
        to.push('\n');
    }
}

fn element(shape: &Shape, palette: &Palette) -> String {
    let paint = |colour: &Colour| match colour {
        Colour::Ink => palette.ink.into(),
        Colour::Grid => palette.grid.into(),
        Colour::Rgb(rgb) => css(*rgb),
    };
    match shape {
        Shape::Line { from: [x1, y1], to: [x2, y2], colour } => format!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{}\"/>",
            paint(colour)
        ),
        Shape::Path { points, colour } => {
            let points: Vec<String> =
                points.iter().map(|[x, y]| format!("{x:.1},{y:.1}")).collect();
            let (points, stroke) = (points.join(" "), paint(colour));
            format!(
                "<polyline points=\"{points}\" fill=\"none\" stroke=\"{stroke}\" \
                 stroke-width=\"1.5\"/>"
            )
        }
        Shape::Area { from: [x1, y1], to: [x2, y2], colour } => format!(
            "<rect x=\"{x1:.1}\" y=\"{y1:.1}\" width=\"{:.1}\" height=\"{:.1}\" fill=\"{}\"/>",
            x2 - x1,
            y2 - y1,
            paint(colour)
        ),
        Shape::Disc { centre: [x, y], radius, colour } => {
            format!(
                "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{}\"/>",
                paint(colour)
            )
        }
        Shape::Text { at: [x, y], anchor, text } => {
            let anchor = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            format!(
                "<text x=\"{x:.1}\" y=\"{y:.1}\" dy=\"0.35em\" text-anchor=\"{anchor}\" \
                 fill=\"{}\">{}</text>",
                palette.ink,
                escaped(text)
            )
        }
    }
}

/// Escapes text for HTML and SVG, in elements and quoted attributes. Names of files and contents of
/// runs may have any character.
pub fn escaped(text: &str) -> String {
    let escape = |c: char| match c {
        '<' => "&lt;".into(),
        '>' => "&gt;".into(),
        '&' => "&amp;".into(),
        '"' => "&quot;".into(),
        '\'' => "&#39;".into(),
        c if c.is_control() && c != '\n' => " ".into(),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_escaped_in_pictures() {
        let shape = Shape::Text { at: [1.0, 2.0], anchor: Anchor::End, text: "a<b>&\u{7}".into() };
        let picture = Picture { size: [10.0, 10.0], shapes: vec![shape] };
        for text in [svg(&picture), inline_svg(&picture, "\"a'<b>")] {
            assert!(text.contains(">a&lt;b&gt;&amp; </text>"), "{text}");
            assert!(!text.contains("<b>"), "{text}");
        }
        assert!(inline_svg(&picture, "\"a'<b>").contains("<title>&quot;a&#39;&lt;b&gt;</title>"));
    }
}
