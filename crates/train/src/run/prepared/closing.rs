//! The end of a run: its last event, its files, and its summary.

use std::path::{Path, PathBuf};

use meristem_data::path_text;

use super::PreparedRun;
use crate::error::Result;
use crate::record::events::Event;
use crate::record::journal::Journal;
use crate::record::run_folder::RunFolder;
use crate::record::summary::{
    FoldSummary, MemorySummary, PlacesSummary, SUMMARY_VERSION, Status, Summary,
};
use crate::record::tensorboard::LiveBoard;
use crate::record::trace::RunTrace;
use crate::run::weights_files::write_newest;

/// Requested trace and TensorBoard event file of a run, on rank 0.
pub(super) struct Views {
    pub(super) trace: Option<RunTrace>,
    pub(super) board: Option<LiveBoard>,
}

/// The way in which a run ended.
pub(super) struct RunOutcome {
    pub(super) status: Status,
    pub(super) error: Option<String>,
    pub(super) memory: MemorySummary,
}

impl PreparedRun {
    /// Closes a run: the last event, the trace, the event file of TensorBoard, the summary.
    pub(super) fn close(
        self,
        folder: Option<&RunFolder>,
        mut journal: Journal<'_>,
        outcome: RunOutcome,
        Views { trace, board }: Views,
    ) -> Result<Summary> {
        let seconds = journal.seconds();
        journal.announce(Event::RunEnded {
            status: outcome.status.into(),
            error: outcome.error.clone(),
            steps: self.totals.steps,
            images: self.totals.images,
            wall_seconds: seconds,
        });
        let (dropped, closed) = journal.close();
        let traced = trace.map(RunTrace::finish).transpose();
        let shown = board.map_or(Ok(()), LiveBoard::finish);
        let path = folder.map_or(Path::new(""), RunFolder::path);
        if let Some(folder) = folder.filter(|_| outcome.status == Status::Failed) {
            write_newest(&self.setup, folder, self.checkpoints.rounds.len());
        }
        let mut summary = self.summary(path, outcome, seconds, dropped);
        summary.trace = traced.as_ref().ok().cloned().flatten();
        let written = folder.map_or(Ok(()), |folder| folder.write_summary(&summary));
        closed?;
        traced?;
        written?;
        shown?;
        Ok(summary)
    }

    fn summary(
        self,
        run_dir: &Path,
        outcome: RunOutcome,
        wall_seconds: f64,
        events_dropped: u64,
    ) -> Summary {
        let totals = self.totals;
        let RunOutcome { status, error, memory } = outcome;
        let threads = self.resources.devices.threads();
        let Self { setup, checkpoints, .. } = self;
        let rate = totals.images as f64 / totals.step_seconds;
        // With an absolute path, as a resumed run reads it from `config.toml`.
        let absolute = setup.config.with_absolute_paths();
        let controller = absolute.as_ref().unwrap_or(&setup.config).controller.to_string();
        // With members, the leaderboard has the scores of each over its folds.
        let folds = setup.config.folds.filter(|_| setup.config.members.is_none());
        Summary {
            v: SUMMARY_VERSION,
            program_version: env!("CARGO_PKG_VERSION").into(),
            status,
            error,
            run_dir: PathBuf::from(run_dir),
            path_is_lossy: path_text::is_lossy(run_dir),
            task: setup.task.kind,
            host: setup.member(0).host.to_string(),
            controller,
            seed: setup.config.seed,
            dataset: checkpoints.identity.dataset,
            input_files: checkpoints.identity.files,
            instruction_set: setup.isa.to_string(),
            threads,
            computed: checkpoints.computed,
            extended: checkpoints.extended,
            ranks: setup.config.ranks(),
            exchange: setup.config.exchange.to_string(),
            exchange_bytes: Some(totals.exchange_bytes).filter(|bytes| *bytes > 0),
            rounds: checkpoints.rounds.len(),
            steps: totals.steps,
            training_steps: totals.training_steps,
            images: totals.images,
            training_flops: totals.training_flops,
            images_per_s: if rate.is_finite() { rate } else { 0.0 },
            wall_seconds,
            step_seconds_total: totals.step_seconds,
            memory,
            hot_path: totals.hot.per_step(),
            counterfactual_cost: totals.counterfactual_cost,
            own_loss: Some(totals.own_loss).filter(|cost| cost.calls > 0),
            rollbacks: totals.rollbacks,
            events_dropped,
            trace: None,
            places: setup.config.places.map(|count| PlacesSummary {
                count,
                busy: totals.place_steps as f64 / (count as u64 * totals.steps).max(1) as f64,
            }),
            folds: folds.and_then(|count| FoldSummary::of(count, &checkpoints.envs)),
            envs: checkpoints.envs,
            round_results: checkpoints.rounds,
        }
    }
}
