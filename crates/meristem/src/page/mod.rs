//! Pages about runs: `runs report` writes them, `serve` updates them.

mod html;
mod members;
mod run;
mod runs;

use meristem::export::drawing::inline_svg;
use meristem::train::reading::Curve;

pub(crate) use self::html::Html;
#[cfg(feature = "serve")]
pub(crate) use self::html::STYLE;
pub(crate) use self::members::ranked;
pub(crate) use self::run::about;
pub(crate) use self::runs::{age, comparison, differences, results, scores, side_by_side, skipped};
use crate::plot::{Chart, Series};

/// Size of a chart in pixels.
const CHART: [f64; 2] = [720.0, 320.0];

/// Part of a page, which `serve` updates separately.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    /// Unique name on the page. Files do not use it.
    #[cfg_attr(not(feature = "serve"), expect(dead_code, reason = "only a server names parts"))]
    pub(crate) id: String,
    pub(crate) html: Html,
}

impl Part {
    pub(crate) fn new(id: impl Into<String>, html: Html) -> Self {
        Self { id: id.into(), html }
    }
}

fn series(name: impl ToString, curve: &Curve, factor: f64) -> Series {
    let points = curve.points().into_iter().map(|[x, y]| [x + 1.0, factor * y]);
    Series { name: name.to_string(), points: points.collect(), shade: None }
}

/// A chart; empty if it has no points.
fn chart(chart: &Chart) -> Html {
    chart.draw(CHART).map_or(Html::default(), |picture| {
        let label = format!("Chart: {}", chart.title);
        Html::picture(inline_svg(&picture, &label), &label)
    })
}
