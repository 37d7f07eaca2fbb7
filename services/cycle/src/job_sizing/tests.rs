use super::*;

fn fleet(rates: &[f64]) -> FleetSnapshot {
    let member = |&tokens_per_s: &f64| crate::FleetMember { tokens_per_s, ..Default::default() };
    FleetSnapshot { generators: rates.iter().map(member).collect(), ..FleetSnapshot::default() }
}

fn cut_up(
    prompts: usize,
    count: u32,
    fleet: &FleetSnapshot,
    sizing: &JobSizing,
) -> Vec<v1::plan::Job> {
    let wanted = |line| PromptDraw { line, prompt_bytes: 10, count };
    let prompts: Vec<PromptDraw> = (0..u32::try_from(prompts).unwrap()).map(wanted).collect();
    split_into_jobs(KIND, &prompts, estimate_sample_bytes(36, false, false), fleet, sizing)
}

const KIND: JobTemplate<'_> = JobTemplate { prefix: "t", purpose: v1::Purpose::Train, suite: "" };

fn size(job: &v1::plan::Job) -> u32 {
    job.draws.iter().map(|draw| draw.count).sum()
}

#[test]
fn every_sample_is_in_exactly_one_job() {
    for (prompts, count) in [(1, 1), (1, 8), (256, 8), (3, 500), (77, 3)] {
        for rates in [&[][..], &[1.0], &[1.0, 2.0, 4.0, 8.0], &[0.0, 5.0]] {
            let jobs = cut_up(prompts, count, &fleet(rates), &JobSizing::default());
            let mut seen = std::collections::BTreeSet::new();
            for draw in jobs.iter().flat_map(|job| &job.draws) {
                for index in draw.first..draw.first + draw.count {
                    assert!(seen.insert((draw.prompt, index)), "planned twice");
                }
            }
            assert_eq!(seen.len(), prompts * count as usize);
        }
    }
}

#[test]
fn jobs_start_large_and_end_small() {
    let jobs = cut_up(256, 8, &fleet(&[10.0, 10.0]), &JobSizing::default());
    let sizes: Vec<u32> = jobs.iter().map(size).collect();
    assert_eq!(sizes[0], 512, "{sizes:?}");
    assert!(sizes.windows(2).all(|pair| pair[0] >= pair[1]), "{sizes:?}");
    assert_eq!(sizes.last(), Some(&8), "{sizes:?}");
}

#[test]
fn a_slow_box_makes_all_jobs_smaller() {
    let even = cut_up(256, 8, &fleet(&[8.0, 8.0]), &JobSizing::default());
    let uneven = cut_up(256, 8, &fleet(&[8.0, 1.0]), &JobSizing::default());
    assert!(size(&uneven[0]) < size(&even[0]) / 2);
}

#[test]
fn a_job_that_would_not_fit_a_message_is_split_never_cut_short() {
    let sizing = JobSizing { bytes_max: 4096, ..JobSizing::default() };
    let jobs = cut_up(4, 64, &fleet(&[1.0]), &sizing);
    assert!(jobs.iter().all(|job| size(job) <= 9), "{:?}", jobs.iter().map(size).max());
    assert_eq!(jobs.iter().map(size).sum::<u32>(), 256);
}

#[test]
fn prompts_may_want_different_numbers_of_samples() {
    let wanted: Vec<PromptDraw> = [3, 0, 17, 1]
        .into_iter()
        .zip(0..)
        .map(|(count, line)| PromptDraw { line, prompt_bytes: 10, count })
        .collect();
    let bytes = estimate_sample_bytes(36, false, false);
    let jobs = split_into_jobs(KIND, &wanted, bytes, &fleet(&[1.0]), &JobSizing::default());
    let mut drawn = std::collections::BTreeMap::<u32, u32>::new();
    for draw in jobs.iter().flat_map(|job| &job.draws) {
        assert_eq!(draw.first, drawn.get(&draw.prompt).copied().unwrap_or(0), "in order");
        *drawn.entry(draw.prompt).or_default() += draw.count;
    }
    assert_eq!(drawn, [(0, 3), (2, 17), (3, 1)].into());
}

#[test]
fn episodes_of_few_tokens_and_long_last_observations_fit_a_message() {
    let bytes = estimate_sample_bytes(4, false, true);
    assert!(bytes > LAST_OBSERVATION_BYTES_MAX as u64);
    let prompts = [PromptDraw { line: 0, prompt_bytes: 10, count: 2000 }];
    let jobs = split_into_jobs(KIND, &prompts, bytes, &fleet(&[1.0]), &JobSizing::default());
    let most = jobs.iter().map(size).max().unwrap() as usize;
    assert!(most * LAST_OBSERVATION_BYTES_MAX < 512 * 1024, "{most} samples");
}
