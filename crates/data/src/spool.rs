//! A decoded split in a temporary file, mapped: what a dataset larger than the device is read from
//! (D7).

use std::io::{BufWriter, Write};

use meristem_device::host::MappedFile;

use crate::error::{Error, Result};
use crate::source::{DatasetFiles, Split};

/// Decodes `split` into a temporary file (NHWC bytes; in `TMPDIR`) and maps it. The file never has a
/// name, so it goes with the map, whatever becomes of the process. `labels` gets the labels. Decoding holds one chunk in memory; the map's pages come and go.
pub(crate) fn write(
    files: &DatasetFiles,
    split: Split,
    labels: &mut Vec<u32>,
) -> Result<MappedFile> {
    let folder = std::env::temp_dir();
    let file = tempfile::tempfile_in(&folder).map_err(Error::io("write", &folder))?;
    let mut out = BufWriter::new(&file);
    files.read(split, &mut |pixels, chunk_labels| {
        out.write_all(pixels).map_err(Error::io("write", &folder))?;
        labels.extend_from_slice(chunk_labels);
        Ok(())
    })?;
    out.flush().map_err(Error::io("write", &folder))?;
    drop(out);
    Ok(MappedFile::from_file(&file, &folder)?)
}
