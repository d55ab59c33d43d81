//! Encoder of shapes as SVG.

use super::{Anchor, Colour, SIZE, Shape};

pub(super) fn encode(shapes: &[Shape]) -> String {
    let [width, height] = SIZE;
    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{height}\" \
         viewBox=\"0 0 {width} {height}\" font-family=\"sans-serif\" font-size=\"14\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
    );
    for shape in shapes {
        text.push_str(&element(shape));
        text.push('\n');
    }
    text.push_str("</svg>\n");
    text
}

fn element(shape: &Shape) -> String {
    let rgb = |[r, g, b]: &Colour| format!("#{r:02x}{g:02x}{b:02x}");
    match shape {
        Shape::Line { from: [x1, y1], to: [x2, y2], colour } => format!(
            "<line x1=\"{x1:.1}\" y1=\"{y1:.1}\" x2=\"{x2:.1}\" y2=\"{y2:.1}\" stroke=\"{}\"/>",
            rgb(colour)
        ),
        Shape::Disc { centre: [x, y], radius, colour } => {
            format!("<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"{radius}\" fill=\"{}\"/>", rgb(colour))
        }
        Shape::Text { at: [x, y], anchor, text } => {
            let anchor = match anchor {
                Anchor::Start => "start",
                Anchor::Middle => "middle",
                Anchor::End => "end",
            };
            format!(
                "<text x=\"{x:.1}\" y=\"{y:.1}\" dy=\"0.35em\" text-anchor=\"{anchor}\">{}</text>",
                escaped(text)
            )
        }
    }
}

/// Escapes the name of a file, which may contain any character.
fn escaped(text: &str) -> String {
    let escape = |c: char| match c {
        '<' => "&lt;".into(),
        '>' => "&gt;".into(),
        '&' => "&amp;".into(),
        c if c.is_control() => " ".into(),
        c => c.to_string(),
    };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_break_the_picture() {
        let shape = Shape::Text { at: [1.0, 2.0], anchor: Anchor::End, text: "a<b>&\u{7}".into() };
        let text = encode(&[shape]);
        assert!(text.contains("text-anchor=\"end\">a&lt;b&gt;&amp; </text>"), "{text}");
    }
}
