//! Devices of a run: one for each env or for each rank with a replica, and those of the policy.

use std::collections::HashSet;

use meristem_device::DeviceId;

use super::table::TrainConfig;
use crate::error::{Error, Result};

/// Device of each env, of each rank with a replica of the one env, and of the policy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Devices {
    /// The device of each env of the run.
    pub(crate) of_envs: Vec<DeviceId>,
    /// The device of each rank, if ranks are threads that train one host; empty otherwise. The
    /// device of rank 0 is that of the env.
    pub(crate) of_ranks: Vec<DeviceId>,
    /// The device of the policy of each rank; one device if one policy decides for all envs.
    pub(crate) of_policies: Vec<DeviceId>,
}

impl Devices {
    /// Distributes the envs over the listed devices, in order and as evenly as possible; the first
    /// devices get one more where needed (5 over 2 is 3, 2). With ranks that are threads and train
    /// one host, the ranks are distributed in place of the envs. The policy is on its named device,
    /// or else on the first; policies of ranks that are threads are distributed over their devices.
    ///
    /// # Errors
    /// An empty list, an unknown name, a device listed twice, more devices than envs, ranks or
    /// policies, a policy device that is not listed, or policy devices of several kinds.
    pub(crate) fn assign(config: &TrainConfig) -> Result<Self> {
        let TrainConfig { envs, policy_device, .. } = config;
        let parse = |name: &str| Ok(name.trim().parse::<DeviceId>()?);
        let listed = config.devices.iter().map(|name| parse(name)).collect::<Result<Vec<_>>>()?;
        let wrong =
            |expected: String| Err(Error::value("devices", config.devices.join(","), expected));
        let Some(&first) = listed.first() else {
            return wrong("at least one device, such as cpu".into());
        };
        if let Some(twice) = listed_twice(&listed) {
            return wrong(format!("each device once, and {twice} is listed twice"));
        }
        let ranks = config.replica_threads();
        let (parts, name) = if ranks > 0 { (ranks, "rank") } else { (*envs, "env") };
        if listed.len() > parts {
            return wrong(format!("at most {parts}, a device for each {name}"));
        }
        let names = policy_device.iter().flat_map(|names| names.split(','));
        let mut policies = names.map(parse).collect::<Result<Vec<_>>>()?;
        if policies.is_empty() {
            policies.push(first);
        }
        check_policies(config, &policies, &listed)?;
        let of_policies = distribute(config.policy_ranks(), &policies);
        let dealt = distribute(parts, &listed);
        Ok(match ranks {
            0 => Self { of_envs: dealt, of_ranks: vec![], of_policies },
            _ => Self { of_envs: vec![first; *envs], of_ranks: dealt, of_policies },
        })
    }

    /// One env, with the policy on the same device.
    pub(crate) fn one(device: DeviceId) -> Self {
        Self { of_envs: vec![device], of_ranks: vec![], of_policies: vec![device] }
    }

    /// The devices of all envs and ranks.
    pub(crate) fn all(&self) -> impl Iterator<Item = DeviceId> {
        self.of_envs.iter().chain(&self.of_ranks).copied()
    }
}

/// Distributes parts over devices, in order and as evenly as possible.
fn distribute(parts: usize, devices: &[DeviceId]) -> Vec<DeviceId> {
    let (each, longer) = (parts / devices.len(), parts % devices.len());
    let counts = devices.iter().zip((0..).map(|i| each + usize::from(i < longer)));
    counts.flat_map(|(id, count)| vec![*id; count]).collect()
}

/// The first device that an earlier element of `ids` names already.
fn listed_twice(ids: &[DeviceId]) -> Option<DeviceId> {
    let mut seen = HashSet::new();
    ids.iter().copied().find(|id| !seen.insert(*id))
}

/// Checks the devices that `policy-device` names: each once, all of them `listed` as devices of the
/// run, and several only for the policies of several ranks that are threads. These are of one kind,
/// because the policies stay equal bit for bit, and kinds round differently.
fn check_policies(config: &TrainConfig, ids: &[DeviceId], listed: &[DeviceId]) -> Result<()> {
    let names = |ids: &[DeviceId], separator: &str| {
        ids.iter().map(DeviceId::to_string).collect::<Vec<_>>().join(separator)
    };
    let wrong = |expected: String| Err(Error::value("policy-device", names(ids, ","), expected));
    if ids.iter().any(|id| !listed.contains(id)) {
        return wrong(format!("one of the `devices`: {}", names(listed, ", ")));
    }
    if let Some(twice) = listed_twice(ids) {
        return wrong(format!("each device once, and {twice} is listed twice"));
    }
    let is_cpu = |id: &DeviceId| matches!(id, DeviceId::Cpu(_));
    if ids.iter().any(|id| is_cpu(id) != is_cpu(&ids[0])) {
        return wrong("devices of one kind, all cpu or all cuda, which round equally".into());
    }
    let policies = if config.comm.is_processes() { 1 } else { config.policy_ranks() };
    match (ids.len(), policies) {
        (1, _) => Ok(()),
        (_, 1) => wrong(
            "one device; several are for the policies of several `ranks` that are threads".into(),
        ),
        (got, ranks) if got > ranks => wrong(format!("at most {ranks}, a device for each rank")),
        _ => Ok(()),
    }
}

/// Checks that a run may move from the devices `before` to the devices `now`. Their indices (1 in
/// `cpu:1`) must be equal, because the order of samples depends on the indices. If ranks train one
/// host (`data_parallel`), only the index of the first device counts: the ranks share its order,
/// and may be anywhere.
///
/// # Errors
/// [`Error::Value`] says which devices can be given.
pub(crate) fn check_moved(before: &[String], now: &[String], data_parallel: bool) -> Result<()> {
    let number = |name: &String| Ok(name.trim().parse::<DeviceId>()?.index());
    let counted = if data_parallel { 1 } else { usize::MAX };
    let numbers =
        |names: &[String]| names.iter().take(counted).map(number).collect::<Result<Vec<u32>>>();
    let (began, given) = (numbers(before)?, numbers(now)?);
    if began == given {
        return Ok(());
    }
    let on_cpu: Vec<String> = began.iter().map(|n| DeviceId::Cpu(*n).to_string()).collect();
    let listed: Vec<String> = began.iter().map(u32::to_string).collect();
    let expected = format!(
        "devices with the numbers {}, such as {}, on which the run was: the order of samples \
         follows from the numbers; cpu:N may take the place of cuda:N, up to {}; with other \
         numbers of devices begin a new run",
        listed.join(", "),
        before.join(","),
        on_cpu.join(",")
    );
    Err(Error::value("devices", now.join(","), expected))
}

#[cfg(test)]
mod tests {
    use meristem_device::Error::BadDeviceName;

    use super::*;
    use crate::config::ConfigLayer;
    use crate::settings::{CommKind, ControllerKind};

    /// Ranks that train one host are distributed like envs, on devices of any number.
    #[test]
    fn replicas_are_dealt_out_evenly() {
        let [a, b] = [0, 3].map(DeviceId::Cpu);
        let of = |names: &[&str], ranks: usize, comm: CommKind| {
            let flags = ConfigLayer {
                devices: Some(names.iter().map(|name| name.to_string()).collect()),
                data_parallel: Some(true),
                ranks: Some(Some(ranks)),
                comm: Some(comm),
                batch: Some(12),
                ..ConfigLayer::default()
            };
            Devices::assign(&TrainConfig::resolve(ConfigLayer::default(), flags)?)
        };
        let three = of(&["cpu", "cpu:3"], 3, CommKind::Threads).unwrap();
        assert_eq!((three.of_envs, three.of_ranks), (vec![a], vec![a, a, b]));
        assert_eq!(three.of_policies, [a], "ranks that train one host have one policy");
        assert_eq!(of(&["cpu:3"], 2, CommKind::Threads).unwrap().of_ranks, [b, b]);
        let error = of(&["cpu", "cpu:3", "cpu:1"], 2, CommKind::Threads).unwrap_err().to_string();
        assert!(error.contains("at most 2, a device for each rank"), "{error}");
        // A process has one rank.
        let error = of(&["cpu", "cpu:3"], 2, CommKind::Mpi).unwrap_err().to_string();
        assert!(error.contains("at most 1, a device for each env"), "{error}");
        let names = |names: &str| names.split(',').map(str::to_owned).collect::<Vec<_>>();
        check_moved(&names("cpu,cpu:3"), &names("cuda:0"), true).unwrap();
        let error = check_moved(&names("cpu,cpu:3"), &names("cpu:3"), true).unwrap_err();
        assert!(error.to_string().contains("devices with the numbers 0"), "{error}");
    }

    fn devices(names: &[&str], policy: Option<&str>, envs: usize) -> Result<Devices> {
        let flags = ConfigLayer {
            devices: Some(names.iter().map(|name| name.to_string()).collect()),
            policy_device: Some(policy.map(str::to_string)),
            envs: Some(envs),
            ..ConfigLayer::default()
        };
        Devices::assign(&TrainConfig::resolve(ConfigLayer::default(), flags)?)
    }

    #[test]
    fn a_run_moves_to_devices_of_the_same_numbers() {
        let check = |before: &str, now: &str| {
            let [before, now] = [before, now].map(|names| names.split(',').map(str::to_owned));
            check_moved(&before.collect::<Vec<_>>(), &now.collect::<Vec<_>>(), false)
        };
        for now in ["cuda:0,cuda:1", "cpu,cpu:1", "cuda:0, cpu:1"] {
            check("cuda:0,cuda:1", now).unwrap();
        }
        for now in ["cuda:0", "cuda:1,cuda:0", "cuda:0,cuda:1,cuda:2", "cuda:0,cuda:2"] {
            let error = check("cuda:0,cuda:1", now).unwrap_err().to_string();
            let words = format!(
                "`devices`: got {now}, expected devices with the numbers 0, 1, such as \
                 cuda:0,cuda:1, on which the run was"
            );
            assert!(error.contains(&words), "{error}");
            assert!(error.contains("up to cpu,cpu:1; with other numbers of devices begin a new"));
        }
    }

    #[test]
    fn envs_are_dealt_out_evenly_and_contiguously() {
        let [a, b, c] = [0, 1, 7].map(DeviceId::Cpu);
        assert_eq!(devices(&["cpu"], None, 3).unwrap().of_envs, [a; 3]);
        let five = devices(&["cpu:0", " cpu:1"], Some("cpu:1"), 5).unwrap();
        assert_eq!((five.of_envs, five.of_policies), (vec![a, a, a, b, b], vec![b]));
        let three = devices(&["cpu:7", "cpu:1", "cpu"], None, 4).unwrap();
        assert_eq!((three.of_envs, three.of_policies), (vec![c, c, b, a], vec![c]));
    }

    /// The policies of ranks that are threads are distributed like envs.
    #[test]
    fn policies_of_ranks_are_dealt_out_evenly() {
        let [a, b] = [0, 1].map(DeviceId::Cpu);
        let of = |policy: &str, ranks: usize, comm: CommKind| {
            let flags = ConfigLayer {
                devices: Some(["cpu", "cpu:1", "cuda:0"].map(str::to_owned).to_vec()),
                policy_device: Some(Some(policy.into())),
                controller: Some(ControllerKind::Ppo),
                ranks: Some(Some(ranks)),
                comm: Some(comm),
                envs: Some(6),
                ..ConfigLayer::default()
            };
            Devices::assign(&TrainConfig::resolve(ConfigLayer::default(), flags)?)
        };
        assert_eq!(of("cpu:1, cpu", 3, CommKind::Threads).unwrap().of_policies, [b, b, a]);
        assert_eq!(of("cpu:1", 2, CommKind::Threads).unwrap().of_policies, [b, b]);
        for (policy, ranks, comm, words) in [
            ("cpu,cpu:1", 1, CommKind::Threads, "expected one device; several are for"),
            ("cpu,cpu:1", 2, CommKind::Mpi, "expected one device; several are for"),
            ("cpu,cpu", 2, CommKind::Threads, "cpu is listed twice"),
            ("cpu,cpu:2", 2, CommKind::Threads, "one of the `devices`: cpu, cpu:1, cuda:0"),
            ("cpu,cuda:0", 2, CommKind::Threads, "all cpu or all cuda"),
            ("cpu,", 2, CommKind::Threads, "`` is not a device"),
        ] {
            let error = of(policy, ranks, comm).unwrap_err();
            assert!(error.to_string().contains(words), "{policy}: {error}");
            assert_eq!(error.exit_code(), 2, "{error}");
        }
    }

    #[test]
    fn what_cannot_be_is_named_with_what_was_expected() {
        for (names, policy, envs, words) in [
            (&[][..], None, 2, "at least one device"),
            (&["gpu"], None, 2, "`gpu` is not a device"),
            (&["cpu", "cpu:0"], None, 2, "cpu is listed twice"),
            (&["cpu:1", "cpu:2", "cpu:1"], None, 4, "cpu:1 is listed twice"),
            (&["cpu:0", "cpu:1", "cpu:2"], None, 2, "at most 2, a device for each env"),
            (
                &["cpu:0", "cpu:1"],
                Some("cpu:2"),
                2,
                "got cpu:2, expected one of the `devices`: cpu, cpu:1",
            ),
            (&["cpu:0"], Some("x"), 2, "`x` is not a device"),
        ] {
            let error = devices(names, policy, envs).unwrap_err();
            let fits = if words.ends_with("is not a device") {
                matches!(error, Error::Device(BadDeviceName { .. }))
            } else {
                matches!(error, Error::Value { .. })
            };
            assert!(fits, "{error:?}");
            assert!(error.to_string().contains(words), "{error}");
            assert_eq!(error.exit_code(), 2, "{error}");
        }
    }
}
