//! Colours on terminals and of the states of runs.

use meristem::export::drawing::Hue;
#[cfg(feature = "serve")]
use meristem::export::drawing::css;
#[cfg(feature = "serve")]
use meristem::train::reading::RunState;
use ratatui::style::Color;

/// The nearest of the 16 terminal colours, which depend on the terminal's theme.
pub(crate) fn terminal(hue: Hue) -> Color {
    match hue {
        Hue::Blue => Color::Blue,
        Hue::Orange => Color::Yellow,
        Hue::Green => Color::Green,
        Hue::Purple => Color::Magenta,
        Hue::Vermilion => Color::Red,
        Hue::SkyBlue => Color::Cyan,
        Hue::Yellow => Color::LightYellow,
        Hue::Grey | Hue::LightGrey | Hue::PaleGrey => Color::DarkGray,
    }
}

/// CSS variables with the colours of the states, such as `--failed`.
#[cfg(feature = "serve")]
pub(crate) fn css_variables() -> String {
    let states = [
        (RunState::Running, Hue::Blue),
        (RunState::Complete, Hue::Green),
        (RunState::Stopped, Hue::Orange),
        (RunState::Failed, Hue::Vermilion),
        (RunState::Killed, Hue::Vermilion),
    ];
    let variable =
        |(state, hue): (RunState, Hue)| format!("--{}:{};", state.name(), css(hue.rgb()));
    format!(":root{{{}}}\n", states.map(variable).concat())
}
