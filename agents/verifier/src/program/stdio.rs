//! Programs that read stdin and write stdout.

use sandbox::{Broken, Ended, How, Limits, Program, Room};
use wire::v1::verifier;

use super::{
    Desk,
    cases::{Case, cases},
    limits,
    native::{Built, build},
    output::Output,
    report::told,
};
use crate::{
    calls::Item,
    language::{Source, asked, source},
    opinion::Opinion,
    tools::Need,
};

#[derive(Debug)]
pub(crate) struct Stdio {
    language: String,
    output: Output,
    limits: Limits,
    compiler: Limits,
    partial: bool,
}

impl From<&verifier::Stdio> for Stdio {
    fn from(stdio: &verifier::Stdio) -> Self {
        Self {
            language: stdio.language.clone(),
            output: stdio.output.as_ref().into(),
            limits: limits::of(stdio.limits.as_ref()),
            compiler: limits::of_compiler(stdio.compile_timeout_s),
            partial: stdio.partial,
        }
    }
}

impl Stdio {
    pub(crate) fn judge(&self, item: &Item, desk: &mut Desk<'_>) -> Opinion {
        self.run(item, desk).unwrap_or_else(|opinion| opinion)
    }

    fn run(&self, item: &Item, desk: &mut Desk<'_>) -> Result<Opinion, Opinion> {
        let cases = cases(item).map_err(Opinion::error)?;
        if cases.is_empty() {
            return Err(Opinion::error("the prompt has no cases: no field \"cases\""));
        }
        let source = read(&self.language, item)?;
        let tool = desk.tool(&Need::Language(source.language))?;
        let files = [(source.language.file(), source.code)];
        desk.in_room(&files, |room| {
            Ok(match build(source.language, tool, &self.compiler, room)? {
                Built::Fails(why) => Opinion::fail(why),
                Built::Trouble(why) => Opinion::trouble(why),
                Built::Runs { argv, .. } => {
                    let all = self.partial;
                    opinion(&run_cases(&argv, &cases, self.output, &self.limits, all, room)?, all)
                }
            })
        })
    }
}

fn opinion(ran: &Ran, partial: bool) -> Opinion {
    if let Some(why) = &ran.not_started {
        return Opinion::trouble(why);
    }
    if ran.passed == ran.total {
        return Opinion::pass();
    }
    let Ran { passed, total, wrong, .. } = ran;
    let failed = Opinion::fail(format!("{passed} of {total} cases passed: {wrong}"));
    if partial { failed.worth(ran.share()) } else { failed }
}

/// The program in a completion, in the language asked for.
pub(super) fn read<'a>(setting: &str, item: &'a Item) -> Result<Source<'a>, Opinion> {
    let wanted = asked(setting, item).map_err(|name| {
        Opinion::error(format!("the prompt's language {name:?} is not known to verifiers"))
    })?;
    source(wanted, &item.completion).map_err(Opinion::fail)
}

/// How a program did on its cases.
#[derive(Debug, Default)]
pub(super) struct Ran {
    pub passed: usize,
    pub total: usize,
    /// Of the first case that went wrong.
    pub wrong: String,
    /// Whether it came to its end by itself, with code 0, whatever it printed.
    pub in_order: bool,
    pub not_started: Option<String>,
}

impl Ran {
    pub(super) fn share(&self) -> f64 {
        if self.total == 0 { 0.0 } else { self.passed as f64 / self.total as f64 }
    }
}

/// Runs a program on its cases, one after the other; on none after one went wrong, unless `all`.
pub(super) fn run_cases(
    argv: &[String],
    cases: &[Case],
    output: Output,
    limits: &Limits,
    all: bool,
    room: &mut Room<'_>,
) -> Result<Ran, Broken> {
    let mut ran = Ran { total: cases.len(), in_order: true, ..Ran::default() };
    for (number, case) in (1..).zip(cases) {
        let stdin = case.input.clone().into_bytes();
        let program = Program { argv: argv.to_vec(), env: Vec::new(), stdin };
        let ended = room.run(&program, limits)?;
        if let How::NotStarted(why) = &ended.how {
            ran.not_started = Some(format!("it cannot be started: {why}"));
            break;
        }
        ran.in_order &= ended.how == How::Exited(0);
        match wrong(&ended, case, output, limits) {
            None => ran.passed += 1,
            Some(wrong) => {
                if ran.wrong.is_empty() {
                    ran.wrong = format!("case {number}: {wrong}");
                }
                if !all {
                    break;
                }
            }
        }
    }
    Ok(ran)
}

fn wrong(ended: &Ended, case: &Case, output: Output, limits: &Limits) -> Option<String> {
    const TOLD_CHARS: usize = 60;
    let short = |text: &str| text.trim_end().chars().take(TOLD_CHARS).collect::<String>();
    if ended.how != How::Exited(0) {
        return Some(told(ended, limits));
    }
    (!output.is(&ended.stdout, &case.output)).then(|| {
        let printed = String::from_utf8_lossy(&ended.stdout);
        format!("it printed {:?}, expected {:?}", short(&printed), short(&case.output))
    })
}
