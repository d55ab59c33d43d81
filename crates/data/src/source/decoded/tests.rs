//! Tests of the cache of decoded images: changed, damaged and shared files.

use super::*;
use crate::error::Result;

const IMAGE: usize = 4;

struct Folder {
    base: tempfile::TempDir,
    files: Vec<ImageFile>,
}

impl Folder {
    /// Three files, the second of which counts as bad.
    fn new() -> Self {
        let base = tempfile::tempdir().unwrap();
        let file = |number: u32| {
            let path = base.path().join(format!("{number}.png"));
            fs::write(&path, [number as u8; 9]).unwrap();
            age(&path, 100);
            ImageFile { path, label: number }
        };
        let files = (0..3).map(file).collect();
        Self { base, files }
    }

    fn place(&self) -> Place {
        Place::in_folder(&self.base.path().join("cache"), "a key".into(), IMAGE)
    }

    fn keep(&self) {
        let mut kept = self.place().create(&self.files);
        for (number, file) in self.files.iter().enumerate() {
            let stamp = image_file::read(&file.path).unwrap().1;
            Kept::add(&mut kept, Some(stamp), number != 1);
        }
        Kept::append(&mut kept, &[1, 2, 3, 4, 5, 6, 7, 8]);
        kept.unwrap().finish();
    }

    fn found(&self) -> bool {
        self.place().open(&self.files).is_some()
    }
}

/// Sets the time of the last change to some seconds before now.
fn age(path: &Path, seconds: u64) {
    let file = File::options().write(true).open(path).unwrap();
    file.set_modified(SystemTime::now() - Duration::from_secs(seconds)).unwrap();
}

#[test]
fn kept_images_come_back_in_any_chunks() {
    let folder = Folder::new();
    assert!(!folder.found());
    folder.keep();
    for chunk in 1..5 {
        let found = folder.place().open(&folder.files).unwrap();
        let (mut pixels, mut labels, mut bad) = (vec![], vec![], vec![]);
        let mut on_bad = |path: &Path| -> Result<()> {
            bad.push(path.to_path_buf());
            Ok(())
        };
        let mut sink = |part: &[u8], of: &[u32]| -> Result<()> {
            pixels.extend_from_slice(part);
            labels.extend_from_slice(of);
            Ok(())
        };
        found.read(&folder.files, chunk, &mut on_bad, &mut sink).unwrap();
        assert_eq!((pixels, labels), (vec![1, 2, 3, 4, 5, 6, 7, 8], vec![0, 2]), "{chunk}");
        assert_eq!(bad, [folder.files[1].path.clone()]);
    }
}

#[test]
fn changed_files_are_noticed_and_touched_ones_compared() {
    let folder = Folder::new();
    folder.keep();
    let path = &folder.files[0].path;
    age(path, 50);
    assert!(folder.found(), "another time, the same contents");
    fs::write(path, [7; 9]).unwrap();
    age(path, 100);
    assert!(!folder.found(), "the same size");
    fs::write(path, [0; 9]).unwrap();
    assert!(folder.found(), "as it was");
    fs::write(path, [0; 8]).unwrap();
    assert!(!folder.found(), "another size");
    fs::remove_file(path).unwrap();
    assert!(!folder.found(), "gone");
    let fewer = &folder.files[1..];
    assert!(folder.place().open(fewer).is_none(), "another list");
}

/// A file may change twice within the resolution of the clock.
#[test]
fn a_file_changed_just_before_it_was_read_is_compared() {
    let folder = Folder::new();
    let path = &folder.files[0].path;
    age(path, 0);
    let time = fs::metadata(path).unwrap().modified().unwrap();
    folder.keep();
    assert!(folder.found());
    fs::write(path, [9; 9]).unwrap();
    File::options().write(true).open(path).unwrap().set_modified(time).unwrap();
    assert!(!folder.found(), "the same size and time");
}

#[test]
fn a_damaged_file_is_as_good_as_none() {
    let folder = Folder::new();
    folder.keep();
    let path = folder.place().path;
    let whole = fs::read(&path).unwrap();
    for at in 0..whole.len() {
        let mut other = whole.clone();
        other[at] ^= 1;
        fs::write(&path, &other).unwrap();
        assert!(!folder.found(), "byte {at}");
        fs::write(&path, &whole[..at]).unwrap();
        assert!(!folder.found(), "{at} bytes");
    }
    fs::write(&path, &whole).unwrap();
    assert!(folder.found());
    let other = Place { key: "another key".into(), ..folder.place() };
    assert!(other.open(&folder.files).is_none(), "the same hash");
}

#[test]
fn the_least_recently_used_go_first() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, seconds) in [("a", 10, 30), ("b", 20, 10), ("c", 30, 20), ("d", 40, 0)] {
        let path = folder.path().join(name).with_extension(ENDING);
        fs::write(&path, vec![0; bytes]).unwrap();
        age(&path, seconds);
    }
    let part = folder.path().join(".x.part");
    fs::write(&part, "x").unwrap();
    make_room(&folder.path().join("d.images"), 65).unwrap();
    let left = files_in(folder.path()).unwrap();
    let left: Vec<_> = left.iter().map(|(path, _)| path.file_stem().unwrap()).collect();
    assert_eq!(left, ["b", "d"]);
    assert!(part.exists(), "another process writes it");
    age(&part, 25 * 3600);
    files_in(folder.path()).unwrap();
    assert!(!part.exists(), "abandoned");
}
