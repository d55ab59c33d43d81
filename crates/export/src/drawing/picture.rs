//! Shapes on a page.

/// Shapes on a page of `size`, in pixels.
#[derive(Clone, Debug, PartialEq)]
pub struct Picture {
    /// Width and height.
    pub size: [f64; 2],
    /// Shapes, of which later ones cover earlier ones.
    pub shapes: Vec<Shape>,
}

/// Shape to draw, with coordinates in pixels from the top left.
#[derive(Clone, Debug, PartialEq)]
pub enum Shape {
    /// Straight line.
    Line {
        /// One end.
        from: [f64; 2],
        /// The other end.
        to: [f64; 2],
        /// Its colour.
        colour: Colour,
    },
    /// Connected lines.
    Path {
        /// Corners, in order.
        points: Vec<[f64; 2]>,
        /// Its colour.
        colour: Colour,
    },
    /// Filled rectangle.
    Area {
        /// Top left corner.
        from: [f64; 2],
        /// Bottom right corner.
        to: [f64; 2],
        /// Its colour.
        colour: Colour,
    },
    /// Filled circle.
    Disc {
        /// Its centre.
        centre: [f64; 2],
        /// Its radius.
        radius: f64,
        /// Its colour.
        colour: Colour,
    },
    /// Text, centred vertically at `at`.
    Text {
        /// Its position.
        at: [f64; 2],
        /// Part of the text that is at the position.
        anchor: Anchor,
        /// Its letters.
        text: String,
    },
}

/// Colour of a shape. A page defines the colours of ink and grid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// Colour of text and axes.
    Ink,
    /// Colour of grid lines.
    Grid,
    /// Red, green and blue.
    Rgb([u8; 3]),
}

impl Colour {
    /// The colour half-way to white; `Ink` and `Grid` are not changed.
    pub fn pale(self) -> Self {
        match self {
            Self::Rgb(rgb) => Self::Rgb(rgb.map(|part| 255 - (255 - part) / 2)),
            other => other,
        }
    }
}

/// Horizontal alignment of a text at its point.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Anchor {
    /// The text begins at the point.
    Start,
    /// The text's middle is at the point.
    Middle,
    /// The text ends at the point.
    End,
}

/// A text.
pub fn text(at: [f64; 2], anchor: Anchor, text: String) -> Shape {
    Shape::Text { at, anchor, text }
}

/// Shortens a name to at most `max` characters, by removing its middle.
pub fn short(name: &str, max: usize) -> String {
    let letters: Vec<char> = name.chars().take(10_000).collect();
    if letters.len() <= max {
        return name.into();
    }
    let part = |range: &[char]| range.iter().collect::<String>();
    let end = letters.len() + 3 - 2 * max / 3;
    format!("{}...{}", part(&letters[..max / 3]), part(&letters[end..]))
}
