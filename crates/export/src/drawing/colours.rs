//! Colours of series and stages. The palette is safe for colour-blind readers (Okabe and Ito,
//! 2008).

use meristem_grow::Stage;

/// A colour of the palette.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hue {
    /// Blue.
    Blue,
    /// Orange.
    Orange,
    /// Bluish green.
    Green,
    /// Reddish purple.
    Purple,
    /// Vermilion.
    Vermilion,
    /// Sky blue.
    SkyBlue,
    /// Yellow.
    Yellow,
    /// Grey.
    Grey,
    /// Light grey.
    LightGrey,
    /// Pale grey.
    PaleGrey,
}

/// Colours of the series of a chart, repeated for further series.
pub const SERIES: [Hue; 8] = [
    Hue::Blue,
    Hue::Orange,
    Hue::Green,
    Hue::Purple,
    Hue::Vermilion,
    Hue::SkyBlue,
    Hue::Grey,
    Hue::Yellow,
];

impl Hue {
    /// Red, green and blue.
    pub const fn rgb(self) -> [u8; 3] {
        match self {
            Hue::Blue => [0, 114, 178],
            Hue::Orange => [230, 159, 0],
            Hue::Green => [0, 158, 115],
            Hue::Purple => [204, 121, 167],
            Hue::Vermilion => [213, 94, 0],
            Hue::SkyBlue => [86, 180, 233],
            Hue::Yellow => [240, 228, 66],
            Hue::Grey => [110, 110, 110],
            Hue::LightGrey => [130, 130, 130],
            Hue::PaleGrey => [170, 170, 170],
        }
    }
}

/// Colour of a stage; `None` for dormant.
pub fn stage_hue(stage: Stage) -> Option<Hue> {
    Some(match stage {
        Stage::Dormant => return None,
        Stage::Germinated => Hue::Yellow,
        Stage::Training => Hue::SkyBlue,
        Stage::Blending => Hue::Orange,
        Stage::Holding => Hue::Purple,
        Stage::Fossilized => Hue::Green,
        Stage::Pruned => Hue::Vermilion,
        Stage::Embargoed => Hue::LightGrey,
        Stage::Resetting => Hue::PaleGrey,
    })
}

/// A colour from orange, for 0, to blue, for 1.
pub fn ramp(share: f64) -> [u8; 3] {
    let mix = |low: u8, high: u8| {
        (f64::from(low) + share.clamp(0.0, 1.0) * (f64::from(high) - f64::from(low))).round() as u8
    };
    let ([a, b, c], [x, y, z]) = (Hue::Orange.rgb(), Hue::Blue.rgb());
    [mix(a, x), mix(b, y), mix(c, z)]
}

/// A colour as a value of CSS and SVG.
pub fn css([r, g, b]: [u8; 3]) -> String {
    format!("#{r:02x}{g:02x}{b:02x}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ramp_leads_from_orange_to_blue() {
        let ends = [Hue::Orange.rgb(), Hue::Blue.rgb(), Hue::Blue.rgb()];
        assert_eq!([0.0, 1.0, 7.0].map(ramp), ends);
        assert_eq!(ramp(0.5), [115, 137, 89]);
    }

    #[test]
    fn every_stage_with_or_after_a_module_has_a_distinct_colour() {
        assert_eq!(stage_hue(Stage::Dormant), None);
        let mut colours: Vec<[u8; 3]> =
            Stage::ALL[1..].iter().map(|of| stage_hue(*of).unwrap().rgb()).collect();
        colours.sort_unstable();
        colours.dedup();
        assert_eq!(colours.len(), Stage::ALL.len() - 1);
    }
}
