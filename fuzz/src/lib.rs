//! Common parts of the fuzz targets: bytes as files, and a host.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};

use meristem_data::{DatasetFiles, DatasetSpec, Source, Split, TableOptions};
use meristem_grow::{BlueprintSet, Host, HostSpec, Rules, TaskShape};

/// Folder of this process. It outlives the process; `fuzz/run` removes the folder around it.
static FOLDER: LazyLock<tempfile::TempDir> =
    LazyLock::new(|| tempfile::tempdir().expect("a temporary folder"));

/// Writes a file of this name, and returns its path.
pub fn file(name: &str, bytes: &[u8]) -> PathBuf {
    let path = FOLDER.path().join(name);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    std::fs::write(&path, bytes).expect("a file in a temporary folder");
    path
}

/// Reads all of a dataset: header, labels and images.
pub fn read_dataset(source: Source, root: PathBuf) {
    read_all(&DatasetSpec { root: Some(root), no_cache: true, ..DatasetSpec::new(source) });
}

/// Reads all of a table.
pub fn read_table(table: TableOptions, root: PathBuf) {
    read_all(&DatasetSpec { root: Some(root), table, ..DatasetSpec::new(Source::Table) });
}

fn read_all(spec: &DatasetSpec) {
    let Ok(files) = DatasetFiles::open(spec) else { return };
    let _ = files.info();
    let _ = files.has(Split::Test);
}

/// A host without modules.
pub fn host() -> Host {
    let spec: HostSpec = "minimal".parse().expect("a preset");
    let image = TaskShape { channels: 1, height: 28, width: 28, classes: 10 };
    let blueprints = Arc::new(BlueprintSet::standard());
    Host::new(spec, image, &[], blueprints, Rules::default()).expect("a host")
}
