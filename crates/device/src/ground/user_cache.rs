//! The user's folder for caches.

use std::path::{Path, PathBuf};

/// Folder of the user's caches: `MERISTEM_CACHE`, or `meristem` in the folder for caches
/// (`XDG_CACHE_HOME`, or `.cache` at home); `None` without any of them.
pub fn user_cache() -> Option<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).filter(|path| !path.is_empty());
    let own = folder("MERISTEM_CACHE").map(PathBuf::from);
    let system = || folder("XDG_CACHE_HOME").map(|path| Path::new(&path).join("meristem"));
    let home = || folder("HOME").map(|path| Path::new(&path).join(".cache/meristem"));
    own.or_else(system).or_else(home)
}
