//! Processes that are killed at the end of their test or after a time limit.

use std::ops::{Deref, DerefMut};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

/// Time limit of a process. The longest takes a fifth of it on a busy machine.
const LIMIT: Duration = Duration::from_secs(300);

/// A process that is killed when its handle is dropped, or after [`LIMIT`].
pub(crate) struct Process {
    child: Option<Child>,
    /// Held by the handle: the watchdog ends when it is dropped.
    _watched: SyncSender<()>,
}

impl Process {
    pub(crate) fn start(command: &mut Command) -> Self {
        let child = command.spawn().unwrap();
        let (id, name) = (child.id().to_string(), format!("{command:?}"));
        let (watched, handle) = sync_channel(0);
        thread::spawn(move || {
            if handle.recv_timeout(LIMIT) == Err(RecvTimeoutError::Timeout) {
                eprintln!("{name} has not ended within {LIMIT:?}: it is killed");
                let _ = Command::new("kill").args(["-KILL", &id]).status();
            }
        });
        Self { child: Some(child), _watched: watched }
    }

    /// Waits for the process. Returns the output that was not read yet.
    pub(crate) fn output(mut self) -> Output {
        self.child.take().unwrap().wait_with_output().unwrap()
    }
}

/// Runs a command to its end.
pub(crate) fn output(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    Process::start(command).output()
}

impl Drop for Process {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have ended by itself.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Deref for Process {
    type Target = Child;
    fn deref(&self) -> &Child {
        self.child.as_ref().unwrap()
    }
}

impl DerefMut for Process {
    fn deref_mut(&mut self) -> &mut Child {
        self.child.as_mut().unwrap()
    }
}

/// Waits until `there` returns true, for at most two minutes. `what` names it in the panic message.
pub(crate) fn wait_for(what: &str, there: impl Fn() -> bool) {
    let started = Instant::now();
    while !there() {
        assert!(started.elapsed() < Duration::from_secs(120), "{what} within two minutes");
        thread::sleep(Duration::from_millis(2));
    }
}
