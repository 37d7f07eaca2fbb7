//! Drawing of the terminal UI. Everything shown by colour is also shown by a word.

use std::collections::BTreeMap;

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Margin, Rect},
    style::{Color, Modifier, Style},
    text::Line,
    widgets::{Block, Borders, Gauge, Paragraph, Row, Table, TableState},
};
use run_view::{
    ActiveJobs, PhaseProgress, RunView, agent_state_text, cycle_findings, failure_lines, load_text,
    sampling_rate_text, trouble_text,
};
use wire::{clock::unix_seconds, v1};

use crate::{
    commands::{cycles_table, perplexities_table},
    output::{HIDDEN_COLUMNS, escape_line, format_bytes},
};

use super::model::{TuiFocus, TuiModel, TuiView};

const AGENT_ROWS_MAX: usize = 12;
const RUN_ROWS_MAX: usize = 6;
/// On a screen with fewer lines, agents get the room of runs, which can be scrolled to.
const LOW_LINES: u16 = 32;
const LOW_RUN_ROWS_MAX: usize = 3;
/// Rows of a list panel besides its items: two borders and the heading.
const PANEL_EXTRA_ROWS: usize = 3;
const RUN_PANEL_ROWS_MIN: u16 = 7;

/// With fewer columns, lists leave out what is also in the view of one run or agent.
const NARROW_COLUMNS: u16 = 100;
/// With fewer columns, only names, states and messages are listed.
const TINY_COLUMNS: u16 = 60;

const KEYS: [(&str, &str); 10] = [
    ("↑ ↓ j k", "select, or scroll"),
    ("Page Up, Page Down", "scroll by ten lines"),
    ("Tab", "change between runs and agents"),
    ("Enter", "open the selected run or agent"),
    ("Esc", "go back"),
    ("p, r", "pause and resume the selected run"),
    ("c", "cancel the selected run"),
    ("d", "drain the selected agent: it finishes its jobs and stops"),
    ("?", "show or hide these keys"),
    ("q", "quit"),
];

pub(super) fn draw_screen(frame: &mut Frame<'_>, model: &TuiModel) {
    let [main, foot] =
        Layout::vertical([Constraint::Min(1), Constraint::Length(1)]).areas(frame.area());
    frame.render_widget(footer_line(model), foot);
    match model.view {
        _ if model.shows_keys => draw_keys(frame, main),
        TuiView::Overview => draw_overview(frame, model, main),
        TuiView::Run => draw_selected_run(frame, model, main),
        TuiView::Agent => draw_selected_agent(frame, model, main),
    }
}

fn draw_overview(frame: &mut Frame<'_>, model: &TuiModel, area: Rect) {
    let height = |rows: usize, most: usize| {
        Constraint::Length(
            u16::try_from(rows.clamp(1, most) + PANEL_EXTRA_ROWS).unwrap_or(u16::MAX),
        )
    };
    let run_rows = if area.height < LOW_LINES { LOW_RUN_ROWS_MAX } else { RUN_ROWS_MAX };
    let areas = Layout::vertical([
        height(model.agents.len(), AGENT_ROWS_MAX),
        height(model.runs.len(), run_rows),
        Constraint::Min(RUN_PANEL_ROWS_MIN),
    ]);
    let [boxes, runs, run] = areas.areas(area);
    draw_agents(frame, model, boxes);
    draw_runs(frame, model, runs);
    draw_selected_run(frame, model, run);
}

fn draw_keys(frame: &mut Frame<'_>, area: Rect) {
    let lines = KEYS.map(|(keys, what)| Line::from(format!("  {keys:<20}{what}")));
    let block = panel_block(" keys ".to_owned(), true);
    frame.render_widget(Paragraph::new(lines.to_vec()).block(block), area);
}

/// Draws lines from the one that the model has scrolled to; the last line always stays visible.
fn draw_scrolled(frame: &mut Frame<'_>, lines: &[Line<'static>], model: &TuiModel, area: Rect) {
    model.scroll_max.set(lines.len().saturating_sub(usize::from(area.height)));
    let top = model.scroll.min(model.scroll_max.get());
    frame.render_widget(Paragraph::new(lines[top..].to_vec()), area);
}

fn draw_selected_agent(frame: &mut Frame<'_>, model: &TuiModel, area: Rect) {
    let Some(agent) = model.selected_agent() else {
        let block = panel_block(" no agents ".to_owned(), true);
        return frame.render_widget(block, area);
    };
    let block = panel_block(escape_line(&format!(" {} ", agent.agent)), true);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let bytes = |bytes: u64| if bytes == 0 { "-".to_owned() } else { format_bytes(bytes) };
    let facts = [
        ("state", agent_state_text(agent, unix_seconds())),
        ("trouble", trouble_text(agent)),
        ("roles", agent.roles.join(", ")),
        ("host", agent.host.clone()),
        ("pool", agent.pool.clone()),
        ("version", agent.version.clone()),
        ("profile", agent.profile.clone()),
        ("load", load_text(agent, unix_seconds())),
        ("tokens/s", sampling_rate_text(agent)),
        ("memory", bytes(agent.rss_bytes)),
        ("for training", bytes(agent.training_bytes)),
        ("jobs done", agent.jobs_done.to_string()),
    ];
    let facts = facts.into_iter().filter(|(_, value)| !value.is_empty());
    let mut lines: Vec<Line<'static>> =
        facts.map(|(name, value)| fact_line(name, &value)).collect();
    lines.extend(agent.engines.iter().map(|engine| fact_line("engine", engine)));
    lines.extend(agent.jobs.iter().map(|job| fact_line("job", &job_label(job))));
    draw_scrolled(frame, &lines, model, inner);
}

fn fact_line(name: &str, value: &str) -> Line<'static> {
    Line::from(format!("  {name:<14}{}", escape_line(value)))
}

fn job_label(job: &v1::ActiveJob) -> String {
    let label = match job.total {
        0 => format!("{} {}", job.run, job.note),
        total => format!("{} {}/{total} {}", job.run, job.done, job.note),
    };
    label.trim_end().to_owned()
}

/// Returns the work of an agent, with each run once: `r-1 3/9 loss 0.4; r-2 ×4`.
fn work_text(agent: &v1::AgentStatus) -> String {
    let mut runs: BTreeMap<&str, Vec<&v1::ActiveJob>> = BTreeMap::new();
    for job in agent.jobs.iter().filter(|job| !job.waits) {
        runs.entry(job.run.as_str()).or_default().push(job);
    }
    let labels = runs.into_iter().map(|(run, jobs)| match jobs.as_slice() {
        [job] => job_label(job),
        more => format!("{run} ×{}", more.len()),
    });
    labels.collect::<Vec<_>>().join("; ")
}

fn panel_block(title: String, focused: bool) -> Block<'static> {
    let style = if focused { Style::new().fg(Color::Cyan) } else { Style::new() };
    Block::new().borders(Borders::ALL).border_style(style).title(title)
}

fn count_label(count: usize, one: &str, more: &str) -> String {
    format!(" {count} {} ", if count == 1 { one } else { more })
}

fn row<const N: usize>(cells: &[String; N]) -> Row<'static> {
    Row::new(cells.each_ref().map(|cell| escape_line(cell)))
}

const SELECTED_STYLE: Style = Style::new().add_modifier(Modifier::REVERSED);

fn draw_agents(frame: &mut Frame<'_>, model: &TuiModel, area: Rect) {
    let rows = model.agents.values().map(|agent| {
        let trouble = trouble_text(agent);
        let does = if trouble.is_empty() { work_text(agent) } else { trouble.clone() };
        let style = match agent.state() {
            _ if !trouble.is_empty() => Style::new().fg(Color::Yellow),
            v1::agent_status::State::Ready => Style::new(),
            _ => Style::new().fg(Color::DarkGray),
        };
        let cells = [
            agent.agent.clone(),
            agent.roles.join(", "),
            agent_state_text(agent, unix_seconds()),
            sampling_rate_text(agent),
            load_text(agent, unix_seconds()),
            does,
        ];
        row(&cells).style(style)
    });
    let optional = |width| if area.width < NARROW_COLUMNS { 0 } else { width };
    let widths = [
        Constraint::Max(20),
        Constraint::Max(optional(20)),
        Constraint::Max(16),
        Constraint::Length(8),
        Constraint::Max(optional(24)),
        Constraint::Min(16),
    ];
    let head = Row::new(["agent", "roles", "state", "tokens/s", "load", "work"]);
    let focused = model.focus == TuiFocus::Agents;
    let title = count_label(model.agents.len(), "agent", "agents");
    let table = Table::new(rows, widths)
        .header(head.style(Modifier::BOLD))
        .row_highlight_style(if focused { SELECTED_STYLE } else { Style::new() })
        .block(panel_block(title, focused));
    let mut at = TableState::new().with_selected(Some(model.selected_agent_index()));
    frame.render_stateful_widget(table, area, &mut at);
    draw_rows_below(frame, area, model.agents.len(), &at);
}

/// Writes on the lower border of a list how many rows are below it.
fn draw_rows_below(frame: &mut Frame<'_>, area: Rect, rows: usize, at: &TableState) {
    let shown = usize::from(area.height).saturating_sub(PANEL_EXTRA_ROWS);
    let below = rows.saturating_sub(at.offset() + shown);
    if below > 0 {
        let label = Line::from(format!("{below} more ↓")).right_aligned();
        draw_on_lower_border(frame, area, label);
    }
}

fn draw_on_lower_border(frame: &mut Frame<'_>, area: Rect, label: Line<'_>) {
    if area.height > 0 {
        let border = Rect { x: area.x, y: area.bottom() - 1, width: area.width, height: 1 };
        frame.render_widget(label, border.inner(Margin::new(2, 0)));
    }
}

fn draw_runs(frame: &mut Frame<'_>, model: &TuiModel, area: Rect) {
    let rows = model.runs.iter().map(|run| {
        let style = match run.state() {
            v1::run::State::Failed => Style::new().fg(Color::Red),
            v1::run::State::Running => Style::new().fg(Color::Green),
            _ => Style::new(),
        };
        let cycle = match run.cycles {
            0 => "-".into(),
            cycles => format!("{}/{cycles}", run.cycle),
        };
        row(&[
            run.run.clone(),
            run.name.clone(),
            run.kind.clone(),
            run.state().as_str_name().to_lowercase(),
            cycle,
            match model.folded_run(&run.run) {
                Some(folded) if run.message.is_empty() => {
                    folded.current_phase().as_str().to_owned()
                }
                _ => run.message.clone(),
            },
        ])
        .style(style)
    });
    let from = |least: u16, width: u16| if area.width < least { 0 } else { width };
    let widths = [
        Constraint::Max(if area.width < TINY_COLUMNS { 16 } else { 28 }),
        Constraint::Max(from(NARROW_COLUMNS, 24)),
        Constraint::Length(from(TINY_COLUMNS, 8)),
        Constraint::Length(10),
        Constraint::Length(from(TINY_COLUMNS, 7)),
        Constraint::Min(8),
    ];
    let head = Row::new(["run", "name", "kind", "state", "cycle", "phase or reason"]);
    let focused = model.focus == TuiFocus::Runs;
    let table = Table::new(rows, widths)
        .header(head.style(Modifier::BOLD))
        .row_highlight_style(SELECTED_STYLE)
        .block(panel_block(count_label(model.runs.len(), "run", "runs"), focused));
    let mut at = TableState::new().with_selected(model.selected_run_index());
    frame.render_stateful_widget(table, area, &mut at);
    draw_rows_below(frame, area, model.runs.len(), &at);
}

/// Returns the state of a run in words.
fn view_state(run: &cycle::Run) -> String {
    control::run_to_proto(run).state().as_str_name().to_lowercase()
}

fn draw_selected_run(frame: &mut Frame<'_>, model: &TuiModel, area: Rect) {
    let Some(run) = &model.run else {
        let nothing = "no runs yet: submit one with `flotilla run submit SPEC`";
        return frame
            .render_widget(Paragraph::new(nothing).block(panel_block(String::new(), false)), area);
    };
    let block = panel_block(format!(" {} ", run.id), false);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [bar, rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(inner);
    let jobs = ActiveJobs::from_statuses(run, model.agents.values());
    let gauge = jobs.phase_progress(run);
    let ratio = gauge.done as f64 / gauge.total.max(1) as f64;
    let label = match run.current_phase() {
        cycle::RunPhase::Done => view_state(run),
        phase => {
            let what = format!("cycle {}: {}", run.active_cycle(), phase.as_str());
            let end = model.run_view.as_ref().map_or(String::new(), RunView::end_text);
            progress_label(&what, &gauge, &end, usize::from(bar.width))
        }
    };
    let whole = run.done.as_ref().is_some_and(|done| done.status() == v1::done::Status::Succeeded);
    let bar_of = Gauge::default()
        .gauge_style(Style::new().fg(Color::Cyan))
        .ratio(if whole { 1.0 } else { ratio.clamp(0.0, 1.0) })
        .label(escape_line(&label));
    frame.render_widget(bar_of, bar);
    let view = control::run_to_proto(run);
    let table_text = match view.cycles_done.len() {
        0 | 1 => perplexities_table(&view, Some(rest.width)),
        _ => cycles_table(&view, Some(rest.width)),
    };
    let (rows, hidden) = split_hidden_columns(&table_text);
    if !hidden.is_empty() {
        draw_on_lower_border(frame, area, Line::from(format!(" {HIDDEN_COLUMNS}{hidden} ")));
    }
    let mut lines: Vec<Line<'static>> =
        rows.lines().map(|line| Line::from(line.to_owned())).collect();
    if model.view == TuiView::Run {
        lines.extend(run_details(&view));
        return draw_scrolled(frame, &lines, model, rest);
    }
    if let Some(failure) = view.failures.last() {
        let why = format!("{} {}: {}", failure.kind, failure.id, failure.message);
        let why = escape_line(&why);
        lines.push(Line::styled(format!("{} failures; {why}", view.failures.len()), Color::Yellow));
    }
    // If not all lines fit, the heading and the newest lines are kept.
    let over = lines.len().saturating_sub(usize::from(rest.height));
    let head = lines.len().min(2);
    if over > 0 && lines.len() > head {
        lines.drain(head..(head + over).min(lines.len()));
    }
    frame.render_widget(Paragraph::new(lines), rest);
}

/// Splits off the last lines of a table, which name the columns that it lacks. Returns the other
/// lines and these names, without the hint at an option, which the screen does not have.
fn split_hidden_columns(table: &str) -> (&str, String) {
    let begin = format!("\n{HIDDEN_COLUMNS}");
    let (rows, hint) = table.split_once(begin.as_str()).unwrap_or((table, ""));
    let names = hint.split(';').next().unwrap_or_default();
    (rows, names.split_whitespace().collect::<Vec<_>>().join(" "))
}

/// Returns a label such as `cycle 1: train 3/9 loss 0.4, run ends in 5 min`, without the note if it
/// does not fit.
fn progress_label(what: &str, progress: &PhaseProgress, end: &str, width: usize) -> String {
    let PhaseProgress { done, total, note } = progress;
    let before = format!("{what} {done}/{total}");
    let whole = format!("{before} {note}{end}");
    let is_cut = whole.chars().count() > width;
    if note.is_empty() || is_cut { format!("{before}{end}") } else { whole }
}

/// Returns the findings and failures of a run, which the overview has no room for.
fn run_details(view: &v1::Run) -> Vec<Line<'static>> {
    let mut lines = vec![Line::default()];
    let findings = view.cycles_done.iter().flat_map(cycle_findings);
    lines.extend(findings.map(|finding| Line::from(escape_line(&finding))));
    let failures = failure_lines(&view.failures).into_iter();
    let failures = failures.map(|text| Line::styled(escape_line(&text), Color::Yellow));
    lines.extend(failures);
    lines
}

fn footer_line(model: &TuiModel) -> Paragraph<'_> {
    match &model.pending_action {
        Some(act) => {
            let act = escape_line(&act.to_string());
            Paragraph::new(format!("{act}? y: confirm, any other key: go back"))
                .style(SELECTED_STYLE)
        }
        None if !model.message.is_empty() => Paragraph::new(escape_line(&model.message)),
        None => {
            let mut keys = vec!["↑↓ select", "Tab runs/agents", "Enter open"];
            if model.view != TuiView::Overview {
                keys = vec!["↑↓ scroll", "Tab runs/agents", "Esc back"];
            }
            let actions = model.possible_actions();
            let actions: Vec<String> =
                actions.iter().map(|(key, it)| format!("{key} {it}")).collect();
            keys.extend(actions.iter().map(String::as_str));
            keys.extend(["? keys", "q quit"]);
            Paragraph::new(keys.join("  "))
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};
    use wire::RunId;

    use super::*;
    use crate::tui::model::TuiKey;

    fn screen(model: &TuiModel, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw_screen(frame, model)).unwrap();
        terminal.backend().to_string()
    }

    fn model() -> TuiModel {
        let mut model = TuiModel::default();
        model.update_agent(v1::AgentStatus {
            agent: "box-1".into(),
            roles: vec!["generator".into()],
            state: v1::agent_status::State::Draining.into(),
            tokens_per_s: 123.4,
            jobs: vec![v1::ActiveJob::default()],
            ..Default::default()
        });
        let run =
            v1::Run { run: "r-1".into(), name: "sums".into(), cycles: 3, ..Default::default() };
        model.update_runs(vec![run]);
        model.select_run(&RunId::new("r-1").unwrap());
        model
    }

    fn spec_record(run: &str) -> wire::Record {
        let body = wire::FactBody::Spec(v1::Spec { name: "sums".into(), ..Default::default() });
        let fact = wire::Fact { subject: format!("flotilla.{run}.spec").parse().unwrap(), body };
        wire::Record { sequence: 1, time_ms: 1, author: None, fact }
    }

    #[test]
    fn boxes_runs_and_keys_are_on_the_screen() {
        let shown = screen(&model(), 100, 24);
        for word in ["1 agent", "box-1", "generator", "123", "r-1", "sums", "0/3", "q quit"] {
            assert!(shown.contains(word), "{word}: {shown}");
        }
    }

    #[test]
    fn the_work_of_an_agent_has_each_run_once() {
        let mut model = model();
        let job = |run: &str, done| {
            let note = "loss 0.4".into();
            v1::ActiveJob { run: run.into(), done, total: 9, note, ..Default::default() }
        };
        let jobs = vec![job("r-2", 1), job("r-1", 3), job("r-2", 2)];
        model.update_agent(v1::AgentStatus { agent: "box-1".into(), jobs, ..Default::default() });
        let shown = screen(&model, 80, 24);
        assert!(shown.contains("r-1 3/9 loss 0.4; r-2 ×2"), "{shown}");
    }

    #[test]
    fn keys_runs_and_agents_are_opened() {
        let mut model = model();
        assert!(!screen(&model, 100, 24).contains("p pause"), "the run has no state yet");
        model.handle_key(TuiKey::Char('?'));
        let shown = screen(&model, 100, 24);
        assert!(shown.contains("open the selected run or agent"), "{shown}");
        model.handle_key(TuiKey::Escape);
        model.handle_key(TuiKey::Tab);
        model.handle_key(TuiKey::Enter);
        let shown = screen(&model, 60, 16);
        for word in ["box-1", "roles", "generator", "jobs done", "Esc back"] {
            assert!(shown.contains(word), "{word}: {shown}");
        }
        assert!(!shown.contains("r-1"), "{shown}");
    }

    #[test]
    fn all_agents_are_on_a_small_screen_beside_many_runs() {
        let mut model = model();
        for agent in ["verifier-1", "evaluator-1", "trainer-1"] {
            model.update_agent(v1::AgentStatus { agent: agent.into(), ..Default::default() });
        }
        let run = |number| v1::Run { run: format!("run-{number}"), ..Default::default() };
        model.update_runs((1..20).map(run).collect());
        let shown = screen(&model, 80, 24);
        for agent in ["verifier-1", "evaluator-1", "trainer-1", "box-1"] {
            assert!(shown.contains(agent), "{agent}: {shown}");
        }
        assert!(screen(&model, 40, 24).contains("run-19"), "names stay on a tiny screen");
    }

    #[test]
    fn a_list_shows_how_many_rows_are_below_it() {
        let mut model = model();
        let run = |number| v1::Run { run: format!("run-{number}"), ..Default::default() };
        model.update_runs((1..12).map(run).collect());
        assert!(screen(&model, 80, 24).contains("8 more ↓"), "{}", screen(&model, 80, 24));
        model.update_runs((1..4).map(run).collect());
        assert!(!screen(&model, 80, 24).contains("more ↓"));
    }

    #[test]
    fn the_list_has_the_phase_of_each_running_run() {
        let mut model = model();
        let state = v1::run::State::Running.into();
        let run = |name: &str| v1::Run { run: name.into(), state, ..Default::default() };
        model.update_runs(vec![run("r-2"), run("r-1")]);
        assert_eq!(model.runs_to_follow(), [RunId::new("r-2").unwrap()], "r-1 is selected");
        model.apply_followed_fact(&spec_record("r-2"));
        let shown = screen(&model, 100, 24);
        let row = shown.lines().find(|line| line.contains("r-2")).unwrap();
        assert!(row.contains("plan"), "{shown}");
        assert!(model.runs_to_follow().is_empty());
    }

    #[test]
    fn the_panel_of_a_run_has_its_id() {
        let mut model = model();
        model.apply_fact(&spec_record("r-1"));
        let shown = screen(&model, 80, 24);
        assert!(shown.contains("┌ r-1 ─") && !shown.contains("sums"), "{shown}");
    }

    #[test]
    fn the_panel_of_a_run_names_columns_that_do_not_fit() {
        let mut model = model();
        model.apply_fact(&spec_record("r-1"));
        assert!(!screen(&model, 100, 24).contains("not shown"));
        let shown = screen(&model, 40, 24);
        assert!(shown.contains("└─ not shown: "), "{shown}");
        assert!(shown.contains("in the store ─"), "{shown}");
        assert!(!shown.contains("--wide"), "{shown}");
    }

    #[test]
    fn a_label_has_a_note_only_if_there_is_one_and_it_fits() {
        let label = |note: &str, width| {
            let progress = PhaseProgress { done: 0, total: 1, note: note.into() };
            progress_label("cycle 1: train", &progress, ", run ends in 5 min", width)
        };
        assert_eq!(label("", 80), "cycle 1: train 0/1, run ends in 5 min");
        assert_eq!(label("loss 0.4", 80), "cycle 1: train 0/1 loss 0.4, run ends in 5 min");
        assert_eq!(label("loss 0.4", 40), "cycle 1: train 0/1, run ends in 5 min");
    }

    #[test]
    fn what_would_be_done_is_asked_for() {
        let mut model = model();
        let state = v1::run::State::Running.into();
        model.update_runs(vec![v1::Run { run: "r-1".into(), state, ..Default::default() }]);
        model.handle_key(TuiKey::Char('c'));
        assert!(screen(&model, 100, 24).contains("cancel r-1? y: confirm"));
    }

    #[test]
    fn text_of_the_fleet_is_escaped_on_the_screen() {
        let hostile = "\u{1b}]0;t\u{7}\u{9b}2J\u{202e}";
        let mut model = model();
        model.update_agent(v1::AgentStatus {
            agent: "a".into(),
            trouble: hostile.into(),
            ..Default::default()
        });
        let run = v1::Run { run: "r-1".into(), message: hostile.into(), ..Default::default() };
        model.update_runs(vec![run]);
        model.message = hostile.into();
        let shown = screen(&model, 300, 24);
        let expected = "\\u{1b}]0;t\\u{7}\\u{9b}2J\\u{202e}";
        assert_eq!(shown.matches(expected).count(), 3, "{shown}");
        assert_eq!(crate::output::escape_text(&shown), shown);
    }

    #[test]
    fn a_small_terminal_and_a_fleet_of_nothing_are_drawn() {
        for (width, height) in [(1, 1), (20, 5), (40, 12), (300, 100)] {
            screen(&TuiModel::default(), width, height);
            screen(&model(), width, height);
        }
    }
}
