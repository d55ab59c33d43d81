//! Colours of stages and states on terminals, in pictures and on pages. The palette is safe for
//! colour-blind readers (Okabe and Ito, 2008).

use meristem::grow::Stage;
#[cfg(feature = "serve")]
use meristem::train::reading::RunState;
use ratatui::style::Color;

/// A colour.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hue {
    /// Red, green and blue.
    pub(crate) rgb: [u8; 3],
    /// The nearest of the 16 terminal colours, which depend on the terminal's theme.
    pub(crate) terminal: Color,
}

const BLUE: Hue = Hue { rgb: [0, 114, 178], terminal: Color::Blue };
const ORANGE: Hue = Hue { rgb: [230, 159, 0], terminal: Color::Yellow };
const GREEN: Hue = Hue { rgb: [0, 158, 115], terminal: Color::Green };
const PURPLE: Hue = Hue { rgb: [204, 121, 167], terminal: Color::Magenta };
const VERMILION: Hue = Hue { rgb: [213, 94, 0], terminal: Color::Red };
const SKY_BLUE: Hue = Hue { rgb: [86, 180, 233], terminal: Color::Cyan };
const YELLOW: Hue = Hue { rgb: [240, 228, 66], terminal: Color::LightYellow };
const GREY: Hue = Hue { rgb: [110, 110, 110], terminal: Color::DarkGray };
const LIGHT_GREY: Hue = Hue { rgb: [130, 130, 130], terminal: Color::DarkGray };
const PALE_GREY: Hue = Hue { rgb: [170, 170, 170], terminal: Color::DarkGray };

/// Colours of the series of a chart, repeated for further series.
pub(crate) const SERIES: [Hue; 8] =
    [BLUE, ORANGE, GREEN, PURPLE, VERMILION, SKY_BLUE, GREY, YELLOW];

/// Colour of a stage; `None` for an empty slot.
pub(crate) fn stage(stage: Stage) -> Option<Hue> {
    Some(match stage {
        Stage::Dormant => return None,
        Stage::Germinated => YELLOW,
        Stage::Training => SKY_BLUE,
        Stage::Blending => ORANGE,
        Stage::Holding => PURPLE,
        Stage::Fossilized => GREEN,
        Stage::Pruned => VERMILION,
        Stage::Embargoed => LIGHT_GREY,
        Stage::Resetting => PALE_GREY,
    })
}

/// A colour from orange, for 0, to blue, for 1.
pub(crate) fn ramp(share: f64) -> [u8; 3] {
    let mix = |low: u8, high: u8| {
        (f64::from(low) + share.clamp(0.0, 1.0) * (f64::from(high) - f64::from(low))).round() as u8
    };
    let ([a, b, c], [x, y, z]) = (ORANGE.rgb, BLUE.rgb);
    [mix(a, x), mix(b, y), mix(c, z)]
}

/// CSS variables with the colours of the states, such as `--failed`.
#[cfg(feature = "serve")]
pub(crate) fn css_variables() -> String {
    let states = [
        (RunState::Running, BLUE),
        (RunState::Complete, GREEN),
        (RunState::Stopped, ORANGE),
        (RunState::Failed, VERMILION),
        (RunState::Killed, VERMILION),
    ];
    let variable = |(state, hue): (RunState, Hue)| format!("--{}:{};", state.name(), css(hue.rgb));
    format!(":root{{{}}}\n", states.map(variable).concat())
}

/// A colour as a value of CSS and SVG.
pub(crate) fn css([r, g, b]: [u8; 3]) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ramp_leads_from_orange_to_blue() {
        assert_eq!([0.0, 1.0, 7.0].map(ramp), [ORANGE.rgb, BLUE.rgb, BLUE.rgb]);
        assert_eq!(ramp(0.5), [115, 137, 89]);
    }

    #[test]
    fn every_stage_with_or_after_a_module_has_a_distinct_colour() {
        assert_eq!(stage(Stage::Dormant), None);
        let mut colours: Vec<[u8; 3]> =
            Stage::ALL[1..].iter().map(|of| stage(*of).unwrap().rgb).collect();
        colours.sort_unstable();
        colours.dedup();
        assert_eq!(colours.len(), Stage::ALL.len() - 1);
    }
}
