//! Tests of the cache of decoded images: changed, damaged and shared files.

use super::*;
use crate::error::Result;
use crate::source::identity::FileId;
use crate::source::image_file;

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
            ImageFile { path, label: number, line: None }
        };
        let files = (0..3).map(file).collect();
        Self { base, files }
    }

    fn place(&self) -> DecodedPlace {
        DecodedPlace::in_folder(&self.base.path().join("cache"), "a key".into(), IMAGE)
    }

    fn keep(&self) {
        self.keep_as_of(0);
    }

    /// Writes the images to the cache as if they had been read `later_ns` later.
    fn keep_as_of(&self, later_ns: i64) {
        let mut kept = self.place().create(&self.files);
        if let Some(kept) = &mut kept {
            kept.description.began_ns += later_ns;
        }
        for (number, file) in self.files.iter().enumerate() {
            let stamp = image_file::read(&file.path).unwrap().1;
            CacheWriter::add(&mut kept, Some(stamp), number != 1);
        }
        CacheWriter::append(&mut kept, &[1, 2, 3, 4, 5, 6, 7, 8]);
        kept.unwrap().finish();
    }

    fn found(&self) -> bool {
        self.place().open(&self.files).is_some()
    }
}

/// Sets the time of the last change to `seconds` before now.
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
        let mut on_bad = |file: &ImageFile| -> Result<()> {
            bad.push(file.path.clone());
            Ok(())
        };
        let mut sink = |part: &[u8], of: TargetChunk<'_>| -> Result<()> {
            let TargetChunk::Classes(of) = of else { panic!("{of:?}") };
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

/// A second change within the resolution of the clock leaves the identity as it was.
#[cfg(unix)]
#[test]
fn an_identity_is_trusted_from_some_seconds_on() {
    const SECOND_NS: i64 = 1_000_000_000;
    for (later_ns, is_trusted) in [(0, false), (SECOND_NS, false), (60 * SECOND_NS, true)] {
        let folder = Folder::new();
        // Sets the time of change of status to now.
        folder.files.iter().for_each(|file| age(&file.path, 100));
        let mut kept = folder.place().create(&folder.files);
        for file in &folder.files {
            let stamp = image_file::read(&file.path).unwrap().1;
            CacheWriter::add(&mut kept, Some(ImageStamp { crc: !stamp.crc, ..stamp }), true);
        }
        CacheWriter::append(&mut kept, &[0; 3 * IMAGE]);
        let mut kept = kept.unwrap();
        kept.description.began_ns += later_ns;
        kept.finish();
        assert_eq!(folder.found(), is_trusted, "{later_ns}");
    }
}

/// Files of equal size and time, as archives leave them, differ in inode and time of change of
/// status.
#[cfg(unix)]
#[test]
fn swapped_files_are_detected() {
    const HOUR_NS: i64 = 3600 * 1_000_000_000;
    let folder = Folder::new();
    let time = SystemTime::now() - Duration::from_secs(100);
    let set_time = |path: &Path| File::options().write(true).open(path)?.set_modified(time);
    folder.files.iter().for_each(|file| set_time(&file.path).unwrap());
    // Old enough that no time is within the resolution of the clock.
    folder.keep_as_of(HOUR_NS);
    assert!(folder.found());
    let [a, b, _] = &folder.files[..] else { panic!() };
    let aside = folder.base.path().join("aside");
    let swap = || {
        fs::rename(&a.path, &aside).unwrap();
        fs::rename(&b.path, &a.path).unwrap();
        fs::rename(&aside, &b.path).unwrap();
    };
    swap();
    assert!(!folder.found(), "two files were swapped");
    swap();
    assert!(folder.found(), "they are back");
    fs::write(&a.path, [5; 9]).unwrap();
    set_time(&a.path).unwrap();
    assert!(!folder.found(), "written in place, its time restored");
    fs::write(&a.path, [0; 9]).unwrap();
    fs::hard_link(&a.path, &aside).unwrap();
    assert!(folder.found(), "a second name does not change the contents");
}

/// Files that were compared once are not read again at the next start.
#[cfg(unix)]
#[test]
fn compared_files_are_kept_with_their_new_identity() {
    let folder = Folder::new();
    folder.keep();
    let describe = || {
        let place = folder.place();
        place.describe(&File::open(&place.path).unwrap()).unwrap()
    };
    let copy = folder.base.path().join("copy");
    let path = &folder.files[0].path;
    fs::copy(path, &copy).unwrap();
    fs::rename(&copy, path).unwrap();
    let now_ns = || FileId::from_metadata(&fs::metadata(path).unwrap());
    let later = identity::now_ns() + 3600 * 1_000_000_000;
    let old = describe();
    assert_ne!(old.stamps[0].id, now_ns());
    let StampComparison::Renewed(stamps) = old.compare(&folder.files, later) else { panic!() };
    let found = folder.place().open(&folder.files).unwrap();
    folder.place().renew(&found, &folder.files, (stamps, later));
    let new = describe();
    assert_eq!((new.stamps[0].id, &new.bad), (now_ns(), &old.bad));
    assert_eq!(new.compare(&folder.files, later), StampComparison::Current, "nothing to renew");
    assert!(folder.found());
    let pixels = |found: CachedImages| {
        let mut pixels = vec![];
        let mut sink = |part: &[u8], _: TargetChunk<'_>| -> Result<()> {
            pixels.extend_from_slice(part);
            Ok(())
        };
        found.read(&folder.files, 9, &mut |_| Ok(()), &mut sink).unwrap();
        pixels
    };
    assert_eq!(pixels(folder.place().open(&folder.files).unwrap()), [1, 2, 3, 4, 5, 6, 7, 8]);
}

/// A file of an older format is not read, but replaced.
#[test]
fn a_file_of_another_version_is_replaced() {
    let folder = Folder::new();
    folder.keep();
    let path = folder.place().path;
    let mut bytes = fs::read(&path).unwrap();
    let end = bytes.len() - 1;
    bytes[end] = b'1';
    fs::write(&path, &bytes).unwrap();
    assert!(!folder.found());
    folder.keep();
    assert!(folder.found());
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
    let other = DecodedPlace { key: "another key".into(), ..folder.place() };
    assert!(other.open(&folder.files).is_none(), "the same hash");
}

#[test]
fn the_least_recently_used_go_first() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, seconds) in [("a", 10, 30), ("b", 20, 10), ("c", 30, 20), ("d", 40, 0)] {
        let path = folder.path().join(name).with_extension(EXTENSION);
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
