//! Settings of a run that trains one member of an earlier run again.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use meristem_data::order::EpochMode;

use crate::config::declare::SettingScope;
use crate::config::types::{Member, Members, Numbers, PlannedChange, PlannedChanges, Scheduler};
use crate::config::{ConfigLayer, TrainConfig, all};
use crate::config_file;
use crate::error::{Error, Result};
use crate::input_file::check_files;
use crate::record::events::Event;
use crate::record::reading::{EventTail, Reached, check_is_run, read_summary};
use crate::setup::{OtherInputs, ResolvedNames};

/// The settings of a run that trains member `member` of the run in `folder` again, without members
/// on which it does not depend. The new run trains the members from which `member` descends by
/// copies, each for the steps that its descendant needs, and `member` as its last member. The envs
/// of the last member have the same bits as the envs of `member` in `folder`. `options`
/// replaces settings that results do not depend on.
///
/// # Errors
/// [`Error::Value`]: an option that results depend on, a member that the run does not have or that
/// made no step, or settings with which envs depend on each other;
/// [`Error::OtherInput`]: a changed input file;
/// [`Error::NotARun`];
/// [`Error::ConfigFile`]: settings that cannot be read;
/// [`Error::Unreadable`]: events or a summary that cannot be read.
pub fn replay(folder: &Path, member: usize, options: ConfigLayer) -> Result<TrainConfig> {
    check_is_run(folder)?;
    let matters =
        |key: &&str| all().iter().any(|own| own.key == *key && own.scope == SettingScope::Result);
    if let Some(key) = options.given().into_iter().find(matters) {
        let expected = "the value of the run, on which the results of the member depend";
        return Err(Error::value(key, "another", expected));
    }
    let settings = config_file::read(&folder.join("config.toml"))?;
    let began = TrainConfig::resolve(settings.clone(), ConfigLayer::default())?;
    let members = began.members.as_ref().map_or(&[][..], Members::all);
    if member >= members.len() {
        let expected = match members.len() {
            0 => "a run with members".into(),
            count => format!("a number below {count}, the number of members"),
        };
        return Err(Error::value("member", member, expected));
    }
    check_independent(&began, member)?;
    let history = MemberChanges::read(&began, &folder.join("events.jsonl"))?;
    let lineage = history.lineage(member)?;
    let trained = distinct(&lineage);
    let envs = trained.iter().flat_map(|own| (*own..began.envs).step_by(members.len()));
    let numbers: Vec<usize> = envs.map(|env| began.env_number(env)).collect();
    let first = trained.iter().map(|own| match history.begun.get(own) {
        Some((_, settings)) => history.settings(*own, settings),
        None => Ok(members[*own].clone()),
    });
    let first = first.collect::<Result<_>>()?;
    let of_member = ConfigLayer {
        envs: Some(numbers.len()),
        members: Some(Some(Members::new(first).map_err(|error| history.unreadable(error))?)),
        member_changes: Some(changes(&lineage, began.steps)),
        env_numbers: Some(Some(Numbers::new(numbers).map_err(|error| history.unreadable(error))?)),
        scheduler: Some(Scheduler::None),
        sampler: None,
        places: None,
        export: None,
        name: None,
        ..settings
    };
    let config = TrainConfig::resolve(of_member, options)?;
    check_inputs(folder, &config)?;
    Ok(config)
}

/// Checks that the files that the settings of a member name have the contents that the run in
/// `folder` has read, as far as its summary lists them.
///
/// # Errors
/// [`Error::OtherInput`]: the first file with other contents.
fn check_inputs(folder: &Path, config: &TrainConfig) -> Result<()> {
    let Some(summary) = read_summary(folder)? else { return Ok(()) };
    let (_, names) = ResolvedNames::of_new(config, OtherInputs::default())?;
    match check_files(folder, &names.input_files()?, &summary.input_files) {
        Err(Error::OtherInput { path, input, began, now, remedy, .. }) => {
            let action = "replay a member of";
            Err(Error::OtherInput { action, path, input, began, now, remedy })
        }
        checked => checked,
    }
}

/// Checks that the members of a run do not depend on each other.
fn check_independent(began: &TrainConfig, member: usize) -> Result<()> {
    let reason = match began {
        TrainConfig { rounds: 2.., .. } => "of several rounds",
        TrainConfig { epoch: EpochMode::Dealt, .. } => "with epoch dealt",
        _ if began.ranks() > 1 => "over several ranks",
        _ if began.controller.sees_all_envs() => "whose controller is a policy or a program",
        _ => return Ok(()),
    };
    let expected =
        format!("a member of another run: in a run {reason} members are not independent");
    Err(Error::value("member", member, expected))
}

/// Steps of one member in a lineage, until the next one copies it.
#[derive(Clone, Debug, PartialEq)]
struct Part {
    member: usize,
    /// Number of completed steps at its end.
    end: usize,
    /// Settings that the member got when it copied the one before; `None` for the first.
    settings: Option<Member>,
}

/// The members of a lineage without duplicates, in the order of their last parts. The last one is
/// the member that is trained again.
fn distinct(lineage: &[Part]) -> Vec<usize> {
    let mut members = vec![];
    for part in lineage.iter().rev() {
        if !members.contains(&part.member) {
            members.push(part.member);
        }
    }
    members.reverse();
    members
}

/// The changes of the members in [`distinct`], which have new numbers from 0, in a run of `steps`
/// steps; `None` if nothing changes.
fn changes(lineage: &[Part], steps: usize) -> Option<PlannedChanges> {
    let members = distinct(lineage);
    let number = |part: &Part| members.iter().position(|member| *member == part.member);
    let end = |member, steps| PlannedChange { member, steps, copy: None };
    let first = lineage.first().and_then(number);
    let later = (0..members.len()).filter(|member| Some(*member) != first);
    let mut changes: Vec<_> = later.map(|member| end(member, 0)).collect();
    for (nth, part) in lineage.iter().enumerate() {
        let member = number(part).unwrap_or(0);
        let next = lineage.get(nth + 1);
        if let Some((next, settings)) = next.and_then(|part| Some((part, part.settings.clone()?))) {
            let (copied, from) = (number(next).unwrap_or(0), member);
            let copy = Some((from, settings));
            changes.push(PlannedChange { member: copied, steps: part.end, copy });
        }
        if next.is_some_and(|next| next.member != part.member) || part.end < steps {
            changes.push(end(member, part.end));
        }
    }
    (!changes.is_empty()).then(|| PlannedChanges::new(changes))
}

/// Beginnings, ends and copies of all members, from the events of a run.
#[derive(Default)]
struct MemberChanges {
    /// Path of the events.
    path: PathBuf,
    /// Number of steps of the run so far.
    steps: usize,
    /// Most steps of a member.
    steps_max: usize,
    /// Members that have begun during the run or with settings that a program chose: their first
    /// step and their settings.
    begun: BTreeMap<usize, (usize, String)>,
    /// Members that have ended, each with the number of its own steps.
    ended: BTreeMap<usize, usize>,
    /// Copies, by time.
    copies: Vec<Copied>,
}

struct Copied {
    member: usize,
    from: usize,
    /// Completed steps at that time.
    steps: usize,
    settings: String,
}

impl MemberChanges {
    /// The history at the beginning of a run.
    fn new(began: &TrainConfig, path: &Path) -> Self {
        let planned = began.member_changes.iter().flat_map(PlannedChanges::all);
        let first = planned.filter(|change| change.steps == 0 && change.copy.is_none());
        let ended = first.map(|change| (change.member, 0)).collect();
        Self { path: path.into(), steps_max: began.steps, ended, ..Self::default() }
    }

    /// The error for an event with settings of a member that cannot be read.
    fn unreadable(&self, problem: impl ToString) -> Error {
        Error::Unreadable { path: self.path.clone(), problem: problem.to_string() }
    }

    /// Parses the settings of a member in an event.
    ///
    /// # Errors
    /// [`Error::Unreadable`]: text that is not a list of settings.
    fn settings(&self, member: usize, text: &str) -> Result<Member> {
        Member::parse(text).map_err(|error| {
            self.unreadable(format!("an event has unreadable settings of member {member}: {error}"))
        })
    }

    fn read(began: &TrainConfig, path: &Path) -> Result<Self> {
        let mut history = Self::new(began, path);
        let mut tail = EventTail::new(path);
        loop {
            match tail.read(u64::MAX, &mut |line| history.note(line.event))? {
                Reached::End => return Ok(history),
                Reached::Limit => {}
                Reached::Restarted => history = Self::new(began, path),
            }
        }
    }

    fn note(&mut self, event: Event) {
        match event {
            Event::StepCompleted(done) => self.steps = self.steps.max(done.step + 1),
            Event::MemberBegun { member, step, settings, .. } => {
                self.begun.insert(member, (step, settings));
            }
            Event::MembersEnded { members, step, .. } => {
                let own = |member| (member, step + 1 - self.first_step(member).min(step));
                let ended: Vec<_> = members.into_iter().map(own).collect();
                self.ended.extend(ended);
            }
            Event::MemberCopied { member, from, step, settings, .. } => {
                self.ended.remove(&member);
                self.copies.push(Copied { member, from, steps: step + 1, settings });
            }
            _ => {}
        }
    }

    /// The first step of a member.
    fn first_step(&self, member: usize) -> usize {
        self.begun.get(&member).map_or(0, |(step, _)| *step)
    }

    /// The lineage of a member, oldest part first: the steps of the member that was no copy, then
    /// the steps after each copy, up to the last step of `member`.
    fn lineage(&self, member: usize) -> Result<Vec<Part>> {
        let steps = self.steps.saturating_sub(self.first_step(member)).min(self.steps_max);
        let (mut own, mut end) = (member, *self.ended.get(&member).unwrap_or(&steps));
        if end == 0 {
            return Err(Error::value("member", member, "a member that was trained"));
        }
        let mut parts = vec![];
        let mut copies = self.copies.iter().rev();
        // A copy made after the member's last step has changed nothing.
        while let Some(copy) = copies.find(|copy| copy.member == own && copy.steps < end) {
            let settings = self.settings(own, &copy.settings)?;
            parts.push(Part { member: own, end, settings: Some(settings) });
            (own, end) = (copy.from, copy.steps);
        }
        parts.push(Part { member: own, end, settings: None });
        parts.reverse();
        Ok(parts)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copied(member: usize, from: usize, steps: usize, settings: &str) -> Copied {
        Copied { member, from, steps, settings: settings.into() }
    }

    #[test]
    fn a_lineage_goes_back_through_the_copies() {
        let copies = vec![
            copied(1, 2, 2, "lr=0.2"),
            copied(0, 1, 4, "lr=0.4"),
            copied(1, 3, 4, "lr=0.3"),
            copied(2, 0, 6, "lr=0.5"),
        ];
        let ended = BTreeMap::from([(2, 6)]);
        let history =
            MemberChanges { steps: 8, steps_max: 8, ended, copies, ..MemberChanges::default() };
        let changes = |member| changes(&history.lineage(member).unwrap(), 8);
        let members = |member| distinct(&history.lineage(member).unwrap());
        assert_eq!(members(0), [2, 1, 0]);
        let expected = r#"["end 1@0","end 2@0","copy 1 from 0@2: lr=0.2","end 0@2",
            "copy 2 from 1@4: lr=0.4","end 1@4"]"#;
        let changes = |member| changes(member).map_or(String::new(), |all| all.to_string());
        assert_eq!(changes(0), expected.replace("\n            ", ""));
        assert_eq!(members(1), [3, 1]);
        assert_eq!(changes(1), r#"["end 1@0","copy 1 from 0@4: lr=0.3","end 0@4"]"#);
        // It was not trained as a copy.
        assert_eq!((members(2), changes(2)), (vec![2], r#"["end 0@6"]"#.into()));
        assert_eq!((members(3), changes(3)), (vec![3], String::new()));
    }

    #[test]
    fn unreadable_settings_are_an_error_of_the_events() {
        let copies = vec![copied(3, 0, 2, "fast")];
        let path = "run/events.jsonl".into();
        let history =
            MemberChanges { path, steps: 4, steps_max: 4, copies, ..MemberChanges::default() };
        assert_eq!(
            history.lineage(3).unwrap_err().to_string(),
            "cannot read run/events.jsonl: an event has unreadable settings of member 3: \
             got `fast`, expected KEY=VALUE, such as lr=0.1"
        );
    }

    #[test]
    fn a_member_may_occur_twice() {
        let copies = vec![copied(0, 1, 2, "lr=0.2"), copied(1, 0, 4, "lr=0.3")];
        let history = MemberChanges { steps: 6, steps_max: 6, copies, ..MemberChanges::default() };
        let lineage = history.lineage(1).unwrap();
        assert_eq!(distinct(&lineage), [0, 1]);
        let expected = r#"["end 0@0","copy 0 from 1@2: lr=0.2","end 1@2",
            "copy 1 from 0@4: lr=0.3","end 0@4"]"#;
        assert_eq!(
            changes(&lineage, 6).unwrap().to_string(),
            expected.replace("\n            ", "")
        );
    }
}
