//! Drawing of the terminal UI. Everything shown by colour is also shown by a word.

use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Modifier, Style},
    text::Line,
    widgets::{Block, Borders, Gauge, Paragraph, Row, Table, TableState},
};
use run_view::{ActiveJobs, RunView, agent_state_text, telemetry_text, trouble_text};
use wire::{clock::unix_seconds, v1};

use crate::{
    commands::{cycles_table, perplexities_table},
    output::escape_line,
};

use super::model::{TuiFocus, TuiModel};

const AGENT_ROWS_MAX: usize = 12;
const RUN_ROWS_MAX: usize = 6;
/// Rows of a list panel besides its items: two borders and the heading.
const PANEL_EXTRA_ROWS: usize = 3;
const RUN_PANEL_ROWS_MIN: u16 = 7;

const KEY_HELP: &str = "↑↓ select  Tab agents/runs  p pause  r resume  c cancel  d drain  q quit";

pub(super) fn draw_screen(frame: &mut Frame<'_>, model: &TuiModel) {
    let height = |rows: usize, most: usize| {
        Constraint::Length(
            u16::try_from(rows.clamp(1, most) + PANEL_EXTRA_ROWS).unwrap_or(u16::MAX),
        )
    };
    let areas = Layout::vertical([
        height(model.agents.len(), AGENT_ROWS_MAX),
        height(model.runs.len(), RUN_ROWS_MAX),
        Constraint::Min(RUN_PANEL_ROWS_MIN),
        Constraint::Length(1),
    ]);
    let [boxes, runs, run, foot] = areas.areas(frame.area());
    draw_agents(frame, model, boxes);
    draw_runs(frame, model, runs);
    draw_selected_run(frame, model, run);
    frame.render_widget(footer_line(model), foot);
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
        let jobs = agent.jobs.iter().filter(|job| !job.waits);
        let jobs = jobs.map(|job| match job.total {
            0 => format!("{} {}", job.run, job.note),
            total => format!("{} {}/{total} {}", job.run, job.done, job.note),
        });
        let trouble = trouble_text(agent);
        let works: Vec<String> = jobs.collect();
        let does = if trouble.is_empty() { works.join("; ") } else { trouble.clone() };
        let style = match agent.state() {
            _ if !trouble.is_empty() => Style::new().fg(Color::Yellow),
            v1::agent_status::State::Ready => Style::new(),
            _ => Style::new().fg(Color::DarkGray),
        };
        let rate = match agent.tokens_per_s {
            rate if rate > 0.0 => format!("{rate:.0}"),
            _ => "-".into(),
        };
        let on = agent.telemetry.as_ref().map_or("-".into(), telemetry_text);
        let cells = [
            agent.agent.clone(),
            agent.roles.join(", "),
            agent_state_text(agent, unix_seconds()),
            rate,
            on,
            does,
        ];
        row(&cells).style(style)
    });
    let widths = [
        Constraint::Max(20),
        Constraint::Max(20),
        Constraint::Max(16),
        Constraint::Length(8),
        Constraint::Max(24),
        Constraint::Min(16),
    ];
    let head = Row::new(["box", "roles", "state", "tokens/s", "doing", "work"]);
    let focused = model.focus == TuiFocus::Agents;
    let title = count_label(model.agents.len(), "agent", "agents");
    let table = Table::new(rows, widths)
        .header(head.style(Modifier::BOLD))
        .row_highlight_style(if focused { SELECTED_STYLE } else { Style::new() })
        .block(panel_block(title, focused));
    let mut at = TableState::new().with_selected(Some(model.selected_agent));
    frame.render_stateful_widget(table, area, &mut at);
}

fn draw_runs(frame: &mut Frame<'_>, model: &TuiModel, area: Rect) {
    let rows = model.runs.iter().map(|run| {
        let style = match run.state() {
            v1::run::State::Failed => Style::new().fg(Color::Red),
            v1::run::State::Running => Style::new().fg(Color::Green),
            _ => Style::new(),
        };
        // The list of runs has no jobs, so only the selected run shows its phase.
        let chosen = model.run.as_ref().filter(|chosen| chosen.id.as_str() == run.run);
        let phase = chosen.map_or("", |run| run.current_phase().as_str());
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
            if run.message.is_empty() { phase.to_owned() } else { run.message.clone() },
        ])
        .style(style)
    });
    let widths = [
        Constraint::Max(28),
        Constraint::Max(24),
        Constraint::Length(8),
        Constraint::Length(10),
        Constraint::Length(7),
        Constraint::Min(10),
    ];
    let head = Row::new(["run", "name", "kind", "state", "cycle", "phase"]);
    let focused = model.focus == TuiFocus::Runs;
    let table = Table::new(rows, widths)
        .header(head.style(Modifier::BOLD))
        .row_highlight_style(SELECTED_STYLE)
        .block(panel_block(count_label(model.runs.len(), "run", "runs"), focused));
    let mut at = TableState::new().with_selected(model.selected_run_index());
    frame.render_stateful_widget(table, area, &mut at);
}

fn draw_selected_run(frame: &mut Frame<'_>, model: &TuiModel, area: Rect) {
    let Some(run) = &model.run else {
        let nothing = "no runs yet: submit one with `flotilla run submit SPEC`";
        return frame
            .render_widget(Paragraph::new(nothing).block(panel_block(String::new(), false)), area);
    };
    let block = panel_block(escape_line(&format!(" {} {} ", run.id, run.spec.name)), false);
    let inner = block.inner(area);
    frame.render_widget(block, area);
    let [bar, rest] = Layout::vertical([Constraint::Length(1), Constraint::Min(1)]).areas(inner);
    let jobs = ActiveJobs::from_statuses(run, model.agents.values());
    let gauge = jobs.phase_progress(run);
    let ratio = gauge.done as f64 / gauge.total.max(1) as f64;
    let (cycle, phase) = (run.active_cycle(), run.current_phase());
    let label = match phase {
        cycle::RunPhase::Done => "done".into(),
        phase => format!(
            "cycle {cycle}: {} {}/{} {}{}",
            phase.as_str(),
            gauge.done,
            gauge.total,
            gauge.note,
            model.run_view.as_ref().map_or(String::new(), RunView::end_text)
        ),
    };
    let whole = phase == cycle::RunPhase::Done;
    let bar_of = Gauge::default()
        .gauge_style(Style::new().fg(Color::Cyan))
        .ratio(if whole { 1.0 } else { ratio.clamp(0.0, 1.0) })
        .label(escape_line(&label));
    frame.render_widget(bar_of, bar);
    let view = control::run_to_proto(run);
    let table_text =
        if view.cycles_done.len() > 1 { cycles_table(&view) } else { perplexities_table(&view) };
    let mut lines: Vec<Line<'_>> =
        table_text.lines().map(|line| Line::from(line.to_owned())).collect();
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

fn footer_line(model: &TuiModel) -> Paragraph<'_> {
    match &model.pending_action {
        Some(act) => {
            let act = escape_line(&act.to_string());
            Paragraph::new(format!("{act}? y: confirm, any other key: cancel"))
                .style(SELECTED_STYLE)
        }
        None if !model.message.is_empty() => Paragraph::new(escape_line(&model.message)),
        None => Paragraph::new(KEY_HELP),
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
            ..Default::default()
        });
        let run =
            v1::Run { run: "r-1".into(), name: "sums".into(), cycles: 3, ..Default::default() };
        model.update_runs(vec![run]);
        model.select_run(&RunId::new("r-1").unwrap());
        model
    }

    #[test]
    fn boxes_runs_and_keys_are_on_the_screen() {
        let shown = screen(&model(), 100, 24);
        for word in ["1 agent", "box-1", "generator", "123", "r-1", "sums", "0/3", "q quit"] {
            assert!(shown.contains(word), "{word}: {shown}");
        }
    }

    #[test]
    fn what_would_be_done_is_asked_for() {
        let mut model = model();
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
