//! A decoded split in a temporary, memory-mapped file: the storage of a dataset larger than the
//! device (D7).

use std::io::{BufWriter, Write};

use meristem_device::MappedFile;

use crate::error::{Error, Result};
use crate::source::{DatasetFiles, Split};
use crate::targets::StoredTargets;

/// Decodes `split` into a temporary file (NHWC bytes; in `TMPDIR`) and maps it. The file never has
/// a name, so it disappears with the mapping, even if the process is killed. `targets` receives the
/// targets. Decoding holds one chunk in memory; pages of the mapping are loaded and evicted as
/// needed.
pub(crate) fn write(
    files: &DatasetFiles,
    split: Split,
    targets: &mut StoredTargets,
) -> Result<MappedFile> {
    let folder = std::env::temp_dir();
    let file = tempfile::tempfile_in(&folder).map_err(Error::io("write", &folder))?;
    let mut out = BufWriter::new(&file);
    files.read(split, &mut |pixels, chunk| {
        out.write_all(pixels).map_err(Error::io("write", &folder))?;
        targets.extend(chunk);
        Ok(())
    })?;
    out.flush().map_err(Error::io("write", &folder))?;
    drop(out);
    Ok(MappedFile::from_file(&file, &folder)?)
}
