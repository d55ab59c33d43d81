//! The place of this process among all processes, from torchrun's environment variables.

use std::env;
use std::net::{SocketAddr, ToSocketAddrs};

use crate::error::{Error, Result};

const OPERATION: &str = "Communicator::rendezvous";

/// Largest number of processes; far above the capacity of one hub.
const SIZE_MAX: usize = 1 << 16;

/// Place of a process among the processes that were started together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ProcessPlace {
    pub(crate) rank: usize,
    pub(crate) size: usize,
    /// Name or address of rank 0's machine.
    pub(crate) address: String,
    /// Port of rank 0.
    pub(crate) port: u16,
}

impl ProcessPlace {
    /// Reads the place from `RANK`, `WORLD_SIZE`, `MASTER_ADDR` and `MASTER_PORT`; `None` if
    /// neither of the first two is set.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for a missing or invalid variable.
    pub(crate) fn from_environment() -> Result<Option<ProcessPlace>> {
        ProcessPlace::read(&|name| env::var(name).ok().filter(|value| !value.is_empty()))
    }

    fn read(variable: &dyn Fn(&str) -> Option<String>) -> Result<Option<ProcessPlace>> {
        if variable("RANK").is_none() && variable("WORLD_SIZE").is_none() {
            return Ok(None);
        }
        let text = |name: &'static str, expected: &str| {
            let missing = || wrong(name, expected, "nothing: the variable is not set");
            variable(name).ok_or_else(missing)
        };
        let number = |name: &'static str, expected: &str| -> Result<usize> {
            let text = text(name, expected)?;
            text.trim().parse().map_err(|_| wrong(name, expected, &text))
        };
        let size = number("WORLD_SIZE", "the number of processes")?;
        if !(1..=SIZE_MAX).contains(&size) {
            let expected = format!("between 1 and {SIZE_MAX}");
            return Err(wrong("WORLD_SIZE", &expected, &size.to_string()));
        }
        let expected = format!("a number below WORLD_SIZE, which is {size}");
        let rank = number("RANK", &expected)?;
        if rank >= size {
            return Err(wrong("RANK", &expected, &rank.to_string()));
        }
        let address = text("MASTER_ADDR", "the name or address of the machine of rank 0")?;
        let expected = "a port that is free on the machine of rank 0";
        let port = number("MASTER_PORT", expected)?;
        // With this variable torchrun's agent listens at the named port, so rank 0 takes the next.
        let agent = variable("TORCHELASTIC_USE_AGENT_STORE");
        let taken = usize::from(agent.is_some_and(|agent| agent.eq_ignore_ascii_case("true")));
        let listens = port.checked_add(taken).filter(|_| port > 0);
        let listens = listens.and_then(|port| u16::try_from(port).ok());
        let port = listens.ok_or_else(|| wrong("MASTER_PORT", expected, &port.to_string()))?;
        Ok(Some(ProcessPlace { rank, size, address, port }))
    }

    /// Addresses of rank 0.
    ///
    /// # Errors
    /// [`Error::BadArgument`] for an unresolvable name.
    pub(crate) fn addresses(&self) -> Result<Vec<SocketAddr>> {
        let resolved = (&*self.address, self.port).to_socket_addrs();
        let resolved: Vec<_> = resolved.map_err(|error| self.unreachable(&error))?.collect();
        if resolved.is_empty() { Err(self.unreachable(&"no address")) } else { Ok(resolved) }
    }

    /// The error for an unreachable rank 0.
    pub(crate) fn unreachable(&self, error: &dyn ToString) -> Error {
        let expected = format!("the machine of rank 0, which listens at port {}", self.port);
        wrong("MASTER_ADDR", &expected, &format!("{}: {}", self.address, error.to_string()))
    }

    /// The error for a port at which rank 0 cannot listen.
    pub(crate) fn cannot_listen(&self, error: &dyn ToString) -> Error {
        let expected = "with MASTER_ADDR an address of this machine, which has rank 0, and a port \
                        that is free";
        let got = format!("{} at {}: {}", self.port, self.address, error.to_string());
        wrong("MASTER_PORT", expected, &got)
    }

    /// The error for a place that rank 0 rejects.
    pub(crate) fn refused(&self, reason: &str) -> Error {
        let expected = "the place of one process among those started together";
        let got = format!("{} of {}: {reason}", self.rank, self.size);
        wrong("RANK", expected, &got)
    }
}

fn wrong(variable: &'static str, expected: &str, got: &str) -> Error {
    Error::argument(OPERATION, variable, expected, got)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(variables: &[(&str, &str)]) -> Result<Option<ProcessPlace>> {
        let value = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        ProcessPlace::read(&value)
    }

    const GOOD: [(&str, &str); 4] =
        [("RANK", "1"), ("WORLD_SIZE", "3"), ("MASTER_ADDR", "node0"), ("MASTER_PORT", "29500")];

    #[test]
    fn torchruns_variables_are_read() {
        let expected = ProcessPlace { rank: 1, size: 3, address: "node0".into(), port: 29_500 };
        assert_eq!(read(&GOOD).unwrap(), Some(expected.clone()));
        let agent = [&GOOD[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(read(&agent).unwrap(), Some(ProcessPlace { port: 29_501, ..expected }));
        assert_eq!(read(&GOOD[2..]).unwrap(), None);
    }

    #[test]
    fn invalid_variables_are_named() {
        const HUGE: &str = "18446744073709551615";
        let agent = [("TORCHELASTIC_USE_AGENT_STORE", "true")];
        let last = GOOD.map(|(n, v)| if n == "MASTER_PORT" { (n, HUGE) } else { (n, v) });
        let error = read(&[&last[..], &agent].concat()).unwrap_err().to_string();
        assert!(error.contains("`MASTER_PORT` must be a port that is free"), "{error}");
        for (name, value, words) in [
            ("RANK", "3", "`RANK` must be a number below WORLD_SIZE, which is 3, got 3"),
            ("RANK", "x", "`RANK` must be a number below WORLD_SIZE, which is 3, got x"),
            ("WORLD_SIZE", "0", "`WORLD_SIZE` must be between 1 and 65536, got 0"),
            ("WORLD_SIZE", HUGE, "`WORLD_SIZE` must be between 1 and 65536, got 18446744"),
            ("MASTER_PORT", "70000", "`MASTER_PORT` must be a port that is free"),
            ("MASTER_PORT", "0", "`MASTER_PORT` must be a port that is free"),
            ("MASTER_PORT", HUGE, "`MASTER_PORT` must be a port that is free"),
            ("MASTER_PORT", "", "got "),
        ] {
            let changed = GOOD.map(|(n, v)| if n == name { (n, value) } else { (n, v) });
            let error = read(&changed).unwrap_err();
            assert!(matches!(error, Error::BadArgument { .. }), "{error:?}");
            assert!(error.to_string().contains(words), "{error}: {words}");
        }
        for missing in 0..4 {
            let mut rest = GOOD.to_vec();
            let (name, _) = rest.remove(missing);
            let error = read(&rest).unwrap_err().to_string();
            let words = "got nothing: the variable is not set";
            assert!(error.contains(&format!("`{name}`")) && error.contains(words), "{error}");
        }
    }
}
