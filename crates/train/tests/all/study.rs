//! Studies whose data change while they run.

use std::fs;
use std::path::Path;

use meristem_train::config::ConfigLayer;
use meristem_train::settings::{BatchLimit, ControllerKind, Preset};
use meristem_train::study::{Contender, Planned, StudyObserver};
use meristem_train::{Observer, StudyConfig, compare};

/// IDX files of 8×8 images, whose pixels depend on `salt`.
fn write_images(root: &Path, salt: u8) {
    for (stem, count) in [("train", 64_u32), ("t10k", 16)] {
        let numbers = |numbers: &[u32]| numbers.iter().flat_map(|n| n.to_be_bytes()).collect();
        let mut images: Vec<u8> = numbers(&[0x803, count, 8, 8]);
        images.extend((0..count * 64).map(|i| (i * 37 % 251) as u8 ^ salt));
        let mut labels: Vec<u8> = numbers(&[0x801, count]);
        labels.extend((0..count).map(|i| (i % 10) as u8));
        fs::write(root.join(format!("{stem}-images-idx3-ubyte")), images).unwrap();
        fs::write(root.join(format!("{stem}-labels-idx1-ubyte")), labels).unwrap();
    }
}

/// Rewrites the images before the second run.
struct Rewrites<'a>(&'a Path);

impl Observer for Rewrites<'_> {}

impl StudyObserver for Rewrites<'_> {
    fn run_begins(&mut self, planned: &Planned<'_>) {
        if planned.number == 2 {
            write_images(self.0, 1);
        }
    }
}

/// Runs of one study have one dataset: a change ends it, in place of results that do not compare.
#[test]
fn a_study_ends_when_its_data_change() {
    let folder = tempfile::tempdir().unwrap();
    write_images(folder.path(), 0);
    let flags = ConfigLayer {
        dataset: Some("fashion-mnist".into()),
        data_root: Some(Some(folder.path().into())),
        preset: Some(Preset::Quick),
        host: Some("minimal".into()),
        envs: Some(1),
        steps: Some(1),
        batch: Some(16),
        max_batches: Some(BatchLimit::Count(1)),
        control_split: Some(Some(0.1)),
        ..ConfigLayer::default()
    };
    let contenders = vec![Contender::Controller(ControllerKind::None)];
    let study = folder.path().join("study");
    let config = StudyConfig::resolve(ConfigLayer::default(), flags, contenders, 2, study).unwrap();
    let error = compare(&config, &mut Rewrites(folder.path())).unwrap_err().to_string();
    assert!(error.contains("`dataset`: got other training and test images or labels"), "{error}");
}
