//! Checkpoints of a run folder: each is written atomically, the last three are kept, and a run
//! resumes from the newest.

use std::path::PathBuf;

use super::file;
use crate::error::{Error, Result};
use crate::position::StepPosition;
use crate::record::directory::Directory;
use crate::record::run_folder::{CHECKPOINTS, write_in};

/// Number of checkpoints to keep.
const KEPT: usize = 3;
const ENDING: &str = ".safetensors";

/// The folder `checkpoints` of a run.
#[derive(Debug)]
pub(crate) struct Store {
    run: Directory,
}

impl Store {
    /// A store in the folder of a run, where the first write creates it.
    ///
    /// # Errors
    /// The process has too many open files.
    pub(crate) fn new(run: &Directory) -> Result<Self> {
        let fail = |source| Error::RunFolder { action: "open", path: run.path().into(), source };
        Ok(Self { run: run.try_clone().map_err(fail)? })
    }

    /// Writes the checkpoint before step `next`, then removes all but the last three. A kill at any
    /// moment leaves the earlier ones intact.
    ///
    /// # Errors
    /// A write failed.
    pub(crate) fn write(&self, next: StepPosition, bytes: &[u8]) -> Result<()> {
        let folder = self.run.create_below(CHECKPOINTS).map_err(|e| self.fail("create", e))?;
        write_in(&folder, &file_name(next), bytes)?;
        let names = self.names(&folder)?;
        for name in names.iter().rev().skip(KEPT) {
            folder.remove_file(name).map_err(|source| self.fail("tidy", source))?;
        }
        Ok(())
    }

    /// The newest checkpoint's path and bytes; `None` if there is none.
    ///
    /// # Errors
    /// [`Error::Checkpoint`]: the file cannot be read. An older checkpoint is used only after the
    /// user has removed this file.
    pub(crate) fn newest(&self) -> Result<Option<(PathBuf, Vec<u8>)>> {
        let folder = self.run.below(CHECKPOINTS).map_err(|source| self.fail("read", source))?;
        let Some(folder) = folder else { return Ok(None) };
        let Some(name) = self.names(&folder)?.pop() else { return Ok(None) };
        let path = folder.path().join(&name);
        let bytes = file::read(&folder, &name)?;
        Ok(Some((path, bytes)))
    }

    /// Names of the checkpoints, oldest first.
    fn names(&self, folder: &Directory) -> Result<Vec<String>> {
        let mut names = folder.names().map_err(|source| self.fail("read", source))?;
        names.retain(|name| name.starts_with("round-") && name.ends_with(ENDING));
        Ok(names)
    }

    fn fail(&self, action: &'static str, source: std::io::Error) -> Error {
        Error::RunFolder { action, path: self.run.path().join(CHECKPOINTS), source }
    }
}

/// File name of the checkpoint before step `next`.
pub(super) fn file_name(StepPosition { round, step }: StepPosition) -> String {
    format!("round-{round:06}-step-{step:06}{ENDING}")
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;

    use meristem_control::ControllerState;
    use meristem_nn::{HostTensor, safetensors};

    use super::super::{Checkpoint, EventsPosition, Identity, Progress};
    use super::*;
    use crate::env::EnvTensors;
    use crate::input_file::checksum;
    use crate::record::summary::DatasetSummary;
    use crate::record::totals::Totals;
    use crate::sweep::Sweep;

    fn identity(config: &str) -> Identity {
        Identity {
            config: config.into(),
            dataset: DatasetSummary::default(),
            instruction_set: "portable".into(),
            files: vec![],
        }
    }

    fn checkpoint(step: usize) -> Checkpoint {
        let mut controller = ControllerState { memory: vec![1, 2, 3], ..Default::default() };
        controller.tensors.insert("w", HostTensor::f32(&[2], vec![f32::NAN, -0.0]));
        Checkpoint {
            progress: Progress {
                identity: identity("seed = 1"),
                computed: vec![],
                extended: vec![],
                next: StepPosition { round: 0, step },
                totals: Totals::default(),
                rounds: vec![],
                last_envs: vec![],
                envs: vec![],
                ended_envs: vec![],
                sweep: Sweep::default(),
                events: EventsPosition { bytes: 7, seq: 3, dropped: 0, seconds: f64::MIN_POSITIVE },
            },
            envs: Vec::<EnvTensors>::new(),
            controller,
        }
    }

    /// A store in a new folder, and its path.
    fn store(base: &Path) -> (Store, PathBuf) {
        (Store::new(&Directory::open(base).unwrap()).unwrap(), base.join(CHECKPOINTS))
    }

    fn write(store: &Store, step: usize) {
        let checkpoint = checkpoint(step);
        store.write(checkpoint.progress.next, &checkpoint.to_bytes().unwrap()).unwrap();
    }

    fn newest(store: &Store) -> Result<(PathBuf, Checkpoint)> {
        let (path, bytes) = store.newest()?.unwrap();
        let checkpoint = Checkpoint::from_bytes(&path, &bytes)?;
        Ok((path, checkpoint))
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<String> =
            entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    #[test]
    fn the_last_three_are_kept_and_the_newest_comes_back_exactly() {
        let base = tempfile::tempdir().unwrap();
        let (store, folder) = store(base.path());
        assert!(store.newest().unwrap().is_none());
        for step in [2, 4, 10, 100] {
            write(&store, step);
        }
        let kept = names(&folder);
        assert_eq!(kept.len(), 3, "{kept:?}");
        assert!(kept[0].contains("step-000004") && kept[2].contains("step-000100"), "{kept:?}");
        let (path, newest) = newest(&store).unwrap();
        assert!(path.ends_with("round-000000-step-000100.safetensors"));
        assert_eq!(newest.progress, checkpoint(100).progress);
        assert_eq!(newest.controller.memory, [1, 2, 3]);
        let tensor = newest.controller.tensors.get("w").unwrap().as_f32().unwrap();
        assert!(tensor[0].is_nan() && tensor[1].to_bits() == (-0.0f32).to_bits());
    }

    #[test]
    fn a_damaged_cut_or_foreign_file_is_named() {
        let base = tempfile::tempdir().unwrap();
        let (store, folder) = store(base.path());
        write(&store, 1);
        let path = folder.join(&names(&folder)[0]);
        let whole = fs::read(&path).unwrap();
        let expect_problem = |bytes: &[u8], words: &str| {
            fs::write(&path, bytes).unwrap();
            let error = newest(&store).unwrap_err();
            let fits = if words.starts_with("version") {
                matches!(error, Error::CheckpointVersion { .. })
            } else {
                matches!(error, Error::Checkpoint { .. })
            };
            assert!(fits, "{error:?}");
            let text = error.to_string();
            assert!(text.contains("step-000001") && text.contains(words), "{text}");
            assert_eq!(fs::read(&path).unwrap(), bytes, "left as it was");
        };
        expect_problem(&whole[..whole.len() - 1], "safetensors");
        expect_problem(&whole[..40], "safetensors");
        expect_problem(b"", "safetensors");
        let mut damaged = whole.clone();
        *damaged.last_mut().unwrap() ^= 1;
        expect_problem(&damaged, "checksum");
        let (state, metadata) = safetensors::from_bytes(&path, &whole).unwrap();
        let with = |key: &str, text: &str| {
            let mut metadata = metadata.clone();
            metadata.insert(key.into(), text.into());
            safetensors::to_bytes(&path, &state, &metadata).unwrap()
        };
        expect_problem(&with("version", "9"), "version 9");
        expect_problem(&with("format", "meristem_checkpoint"), "not a checkpoint");
        // The key of earlier builds.
        expect_problem(&with("checksum", "00000000"), "checksum");
        fs::write(&path, with("checksum", &checksum(&state))).unwrap();
        newest(&store).unwrap();
    }

    #[test]
    fn a_checkpoint_of_another_run_says_what_is_different() {
        let ours = identity("host = \"baseline\"\nseed = 1");
        let file = Path::new("round-1.safetensors");
        ours.check(file, &ours).unwrap();
        let expect_problem = |other: &Identity, words: &str| {
            let error = ours.check(file, other).unwrap_err();
            assert!(error.to_string().contains(words), "{error}");
            error
        };
        let error = expect_problem(&identity("host = \"baseline\"\nseed = 2"), "`seed = 2`");
        assert!(matches!(error, Error::OtherSettings { .. }), "{error:?}");
        let best = meristem_device::Isa::detect().name();
        for (set, remedy) in [
            ("avx1024", "this machine has portable".to_string()),
            ("avx1024", format!("{best} and lacks avx1024")),
            (best, format!("set MERISTEM_ISA={best}")),
        ] {
            let ours = Identity { instruction_set: "none".into(), ..ours.clone() };
            let other = Identity { instruction_set: set.into(), ..ours.clone() };
            let error = ours.check(file, &other).unwrap_err();
            let words =
                format!("instruction set of the kernels: none, but the run began with {set}");
            assert!(error.to_string().contains(&words), "{error}");
            let text = error.remedy().unwrap();
            assert!(text.contains(&remedy) && text.contains("nothing was overwritten"), "{text}");
            assert_eq!(error.exit_code(), 2, "{error}");
        }
    }

    #[test]
    fn other_data_are_told_by_their_first_difference() {
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let began = DatasetSummary {
            train_samples: 90,
            control_samples: 10,
            image: [1, 8, 8],
            classes: names(&["cat", "dog"]),
            mean: vec![0.25],
            checksums: names(&["aa", "bb"]),
            ..DatasetSummary::default()
        };
        let sum = |sums: &[&str]| DatasetSummary { checksums: names(sums), ..began.clone() };
        for (now, words) in [
            (
                DatasetSummary { train_samples: 80, ..sum(&["cc", "bb"]) },
                "number of training images: 90, but the run began with 100",
            ),
            (
                DatasetSummary { image: [1, 9, 8], ..sum(&["cc", "bb"]) },
                "rows and columns of the images: 1x9x8, but the run began with 1x8x8",
            ),
            (
                DatasetSummary { classes: names(&["cat", "cow"]), ..sum(&["aa", "bb"]) },
                "name of class 1: `cow`, but the run began with `dog`",
            ),
            (
                DatasetSummary { mean: vec![0.5], ..sum(&["cc", "bb"]) },
                "checksum of training images and labels: cc, but the run began with aa",
            ),
            (sum(&["aa", "cc"]), "checksum of test images and labels: cc"),
            (DatasetSummary { mean: vec![0.5], ..sum(&[]) }, "mean of the training images: 0.5"),
        ] {
            let of = |dataset| Identity { dataset, ..identity("seed = 1") };
            let file = Path::new("round-1.safetensors");
            let error = of(now).check(file, &of(began.clone())).unwrap_err();
            assert!(matches!(error, Error::OtherInput { .. }), "{error:?}");
            assert!(error.to_string().contains(words), "{error}");
        }
        // Older checkpoints have no checksums.
        let of = |dataset| Identity { dataset, ..identity("seed = 1") };
        of(began.clone()).check(Path::new("r"), &of(sum(&[]))).unwrap();
    }
}
