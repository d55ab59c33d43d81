//! Progress of studies on the terminal.

use std::io::stderr;

use meristem::nn::Network;
use meristem::train::study::{Contender, Planned, StudyObserver};
use meristem::train::{Event, Notice, Observer};

use crate::environment::is_drawable;
use crate::plain::{self, printable};
use crate::progress::{Mode, Progress};

/// Observer that prints the progress of each run on stderr, because results are on stdout.
pub(super) struct PrintedStudy {
    mode: Mode,
    progress: Progress,
}

impl PrintedStudy {
    /// With `quiet`, prints only warnings and errors.
    pub(super) fn new(quiet: bool) -> Self {
        let mode = if quiet {
            Mode::Quiet
        } else if is_drawable(&stderr()) {
            Mode::Bars
        } else {
            Mode::LinesOnStderr
        };
        Self { mode, progress: Progress::new(mode) }
    }
}

impl Observer for PrintedStudy {
    fn notice(&mut self, notice: &Notice<'_>) {
        self.progress.notice(notice);
    }

    fn event(&mut self, event: &Event) {
        self.progress.event(event);
    }

    fn batch_enqueued(&mut self, env: usize, network: &Network) -> meristem::train::Result<()> {
        self.progress.batch_enqueued(env, network)
    }

    fn stop_requested(&self) -> bool {
        self.progress.stop_requested()
    }
}

impl StudyObserver for PrintedStudy {
    fn seeds_are_known(&mut self, contender: &Contender, seeds: &[u64]) {
        let seeds = seeds.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        plain::err(&format!(
            "warning: the policy of {contender} was trained with seed {seeds}, \
             so it has seen these hosts and images; give another --seed, or none"
        ));
    }

    fn run_begins(&mut self, planned: &Planned<'_>) {
        self.progress = Progress::new(self.mode);
        self.progress.line(&title(planned));
    }

    fn run_is_complete(&mut self, planned: &Planned<'_>) {
        self.progress.line(&format!("{}, complete", title(planned)));
    }
}

fn title(planned: &Planned<'_>) -> String {
    let &Planned { number, of, name, seed, learns } = planned;
    let what = if learns { "training for" } else { "with" };
    printable(&format!("run {number} of {of}: {name} {what} seed {seed}"))
}
