//! Requests to the store that run beside the control loop: a slow store delays only the runs that
//! need it.

use std::{
    collections::{BTreeMap, btree_map::Entry},
    panic::resume_unwind,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::Semaphore,
    time::{Instant, timeout, timeout_at},
};
use tokio_util::task::AbortOnDropHandle;
use wire::RunId;

/// Tasks that run at once, because each may hold a file in memory; others wait.
const TASKS_MAX: usize = 4;

/// The interval of warnings while a task runs. The store's own limits end its requests.
const WARN_INTERVAL: Duration = Duration::from_secs(60);

/// Tasks with the store, at most one for each run. Each has an input, to which its result belongs.
pub(crate) struct StoreTasks<I, T> {
    tasks: BTreeMap<RunId, (I, AbortOnDropHandle<T>)>,
    room: Arc<Semaphore>,
}

impl<I, T> Default for StoreTasks<I, T> {
    fn default() -> Self {
        Self { tasks: BTreeMap::new(), room: Arc::new(Semaphore::new(TASKS_MAX)) }
    }
}

impl<I: PartialEq, T: Send + 'static> StoreTasks<I, T> {
    /// Returns the result of a run's task, and forgets the task; `None` while it runs. If the run has
    /// no task, or the result of another input, starts one and waits for it until `until`.
    pub(crate) async fn poll_task<F>(
        &mut self,
        run: &RunId,
        input: I,
        until: Instant,
        start: impl FnOnce() -> F,
    ) -> Option<T>
    where
        F: Future<Output = T> + Send + 'static,
    {
        if let Some((of, task)) = self.tasks.get(run) {
            if !task.is_finished() {
                return None;
            }
            if *of != input {
                self.tasks.remove(run);
            }
        }
        let (_, task) = match self.tasks.entry(run.clone()) {
            Entry::Occupied(task) => task.into_mut(),
            Entry::Vacant(place) => {
                let (room, work, run) = (self.room.clone(), start(), run.clone());
                let task = AbortOnDropHandle::new(tokio::spawn(async move {
                    // The semaphore is never closed.
                    let _permit = room.acquire_owned().await;
                    let mut work = pin!(work);
                    loop {
                        match timeout(WARN_INTERVAL, &mut work).await {
                            Ok(done) => return done,
                            Err(_) => tracing::warn!(%run, "the store keeps this run waiting"),
                        }
                    }
                }));
                place.insert((input, task))
            }
        };
        let done = timeout_at(until, task).await.ok()?;
        self.tasks.remove(run);
        match done.map_err(tokio::task::JoinError::try_into_panic) {
            Ok(result) => Some(result),
            Err(Ok(panic)) => resume_unwind(panic),
            // The runtime is ending.
            Err(Err(_)) => None,
        }
    }

    /// Returns true if a run has a task without a result.
    pub(crate) fn is_running(&self, run: &RunId) -> bool {
        self.tasks.get(run).is_some_and(|(_, task)| !task.is_finished())
    }

    /// Ends the task of a run, and drops its result.
    pub(crate) fn end_task(&mut self, run: &RunId) {
        self.tasks.remove(run);
    }

    /// Ends the tasks of the other runs, and drops their results.
    pub(crate) fn retain_runs(&mut self, is_kept: impl Fn(&RunId) -> bool) {
        self.tasks.retain(|run, _| is_kept(run));
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::sleep;

    use super::*;

    const WAIT: Duration = Duration::from_secs(2);

    async fn work(seconds: u64) -> u64 {
        sleep(Duration::from_secs(seconds)).await;
        seconds
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_store_is_waited_for_once_and_then_works_beside_the_loop() {
        let run = |name: &str| RunId::new(name).unwrap();
        let mut tasks = StoreTasks::default();
        let began = Instant::now();
        let until = began + WAIT;
        assert_eq!(tasks.poll_task(&run("slow"), (), until, || work(500)).await, None);
        assert_eq!(began.elapsed().as_secs(), 2);
        assert_eq!(
            tasks.poll_task(&run("late"), (), until, || work(1)).await,
            None,
            "no time is left"
        );
        let until = Instant::now() + WAIT;
        assert_eq!(tasks.poll_task(&run("fast"), (), until, || work(1)).await, Some(1));
        assert_eq!(tasks.poll_task(&run("slow"), (), until, || work(7)).await, None);
        assert_eq!(began.elapsed().as_secs(), 3, "the slow one is not awaited");
        assert!(tasks.is_running(&run("slow")) && !tasks.is_running(&run("fast")));
        sleep(Duration::from_secs(500)).await;
        assert!(!tasks.is_running(&run("slow")));
        assert_eq!(tasks.poll_task(&run("slow"), (), until, || work(7)).await, Some(500));
        assert_eq!(tasks.poll_task(&run("late"), (), until, || work(7)).await, Some(1));
        assert!(tasks.tasks.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn tasks_of_ended_runs_end_and_few_run_at_once() {
        let mut tasks = StoreTasks::default();
        let runs: Vec<RunId> =
            (0..=TASKS_MAX).map(|n| RunId::new(format!("run-{n}")).unwrap()).collect();
        let (last, others) = runs.split_last().unwrap();
        for run in &runs {
            assert_eq!(tasks.poll_task(run, (), Instant::now(), || work(500)).await, None);
        }
        sleep(Duration::from_secs(600)).await;
        assert_eq!(tasks.poll_task(last, (), Instant::now(), || work(1)).await, None, "it waited");
        tasks.retain_runs(|run| run != last);
        assert_eq!(tasks.poll_task(last, (), Instant::now() + WAIT, || work(1)).await, Some(1));
        for run in others {
            let soon = Instant::now() + WAIT;
            assert_eq!(tasks.poll_task(run, (), soon, || work(1)).await, Some(500));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_result_of_another_input_is_dropped() {
        let run = RunId::new("run").unwrap();
        let mut tasks = StoreTasks::default();
        assert_eq!(tasks.poll_task(&run, 'a', Instant::now(), || work(3)).await, None);
        sleep(WAIT * 2).await;
        let soon = Instant::now() + WAIT;
        assert_eq!(tasks.poll_task(&run, 'b', soon, || work(1)).await, Some(1));
        assert_eq!(tasks.poll_task(&run, 'b', Instant::now(), || work(3)).await, None);
        sleep(WAIT * 2).await;
        tasks.end_task(&run);
        let soon = Instant::now() + WAIT;
        assert_eq!(tasks.poll_task(&run, 'b', soon, || work(1)).await, Some(1));
    }
}
