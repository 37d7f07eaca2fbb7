use super::*;
use crate::telemetry::{GpuReading, GpuTemperature, tests::tree};

fn hours(text: &str) -> QuietHours {
    text.parse().unwrap()
}

fn now(second: u64, celsius: f64, watts: f64, busy: f64) -> HostTelemetry {
    let gpu = GpuReading {
        busy_percent: Some(busy),
        temperatures: vec![GpuTemperature { sensor: "edge".into(), celsius, critical: None }],
        ..GpuReading::default()
    };
    HostTelemetry {
        at_ms: second * 1000,
        sensors_at_ms: second * 1000,
        gpus: vec![gpu],
        watts: Some(watts),
        ..HostTelemetry::default()
    }
}

fn look(now: &HostTelemetry) -> OwnerPolicyInput<'_> {
    OwnerPolicyInput { telemetry: now, minute: 12 * 60, foreign_processes: &[], idle: false }
}

#[test]
fn quiet_hours_hold_over_midnight_by_the_minute() {
    let night = hours("22:00-07:00");
    let held = |minute: u16| night.contains_minute(minute);
    assert_eq!(
        [0, 6 * 60 + 59, 7 * 60, 12 * 60, 21 * 60 + 59, 22 * 60].map(held),
        [true, true, false, false, false, true]
    );
    assert!(
        hours("09:00-17:30").contains_minute(17 * 60 + 29)
            && !hours("09:00-17:30").contains_minute(17 * 60 + 30)
    );
    assert_eq!(night.to_string(), "22:00-07:00");
    for bad in [
        "",
        "22-7",
        "22:00",
        "24:00-07:00",
        "22:60-07:00",
        "7:00-8:00",
        "07:00-07:00",
        "a:b-c:d",
        "٠٧:00-08:00",
    ] {
        let refused = bad.parse::<QuietHours>().unwrap_err().to_string();
        assert!(refused.contains("22:00-07:00"), "{refused}");
    }
}

#[test]
fn no_work_is_taken_in_quiet_hours_and_the_reason_is_returned() {
    let wishes = OwnerLimits { quiet: vec![hours("22:00-07:00")], ..OwnerLimits::default() };
    let mut citizen = OwnerPolicy::new(wishes);
    let now = now(0, 40.0, 20.0, 0.0);
    assert_eq!(citizen.blocked_reason(&look(&now)), None);
    let night = OwnerPolicyInput { minute: 23 * 60, ..look(&now) };
    assert_eq!(citizen.blocked_reason(&night).unwrap(), "quiet hours 22:00-07:00");
}

#[test]
fn a_hot_host_takes_no_work_until_it_is_five_degrees_cooler() {
    let mut citizen =
        OwnerPolicy::new(OwnerLimits { max_celsius: Some(85.0), ..OwnerLimits::default() });
    let mut rests = |second: u64, celsius: f64| {
        citizen.blocked_reason(&look(&now(second, celsius, 0.0, 0.0))).is_some()
    };
    assert!(!rests(0, 90.0), "a spike is none");
    assert!(!rests(5, 80.0));
    assert!(!rests(6, 90.0));
    assert!(rests(16, 90.0));
    assert!(rests(80, 82.0));
    assert!(!rests(81, 80.0));
}

#[test]
fn a_rest_for_power_lasts_a_minute_at_least() {
    let mut citizen =
        OwnerPolicy::new(OwnerLimits { max_watts: Some(150.0), ..OwnerLimits::default() });
    let mut rests =
        |second: u64, watts: f64| citizen.blocked_reason(&look(&now(second, 0.0, watts, 0.0)));
    assert_eq!(rests(0, 200.0), None);
    assert_eq!(rests(10, 200.0).unwrap(), "200 W, above the owner's limit of 150 W");
    assert!(rests(30, 20.0).is_some());
    assert!(rests(70, 20.0).is_none());
}

#[test]
fn another_program_s_process_on_the_card_comes_first() {
    let mut citizen =
        OwnerPolicy::new(OwnerLimits { yield_to_owner: true, ..OwnerLimits::default() });
    let calm = now(0, 0.0, 0.0, 0.0);
    let other = [ForeignProcess { pid: 7, name: "python3".into() }];
    let told =
        citizen.blocked_reason(&OwnerPolicyInput { foreign_processes: &other, ..look(&calm) });
    assert_eq!(told.unwrap(), "python3 (7) uses the GPU");
    assert_eq!(citizen.blocked_reason(&look(&calm)), None);
}

#[test]
fn a_gpu_that_is_busy_while_the_agent_is_idle_works_for_another_program() {
    let mut citizen =
        OwnerPolicy::new(OwnerLimits { yield_to_owner: true, ..OwnerLimits::default() });
    let mut rests = |second: u64, busy: f64, idle: bool, fresh: bool| {
        let mut now = now(second, 0.0, 0.0, busy);
        now.sensors_at_ms -= if fresh { 0 } else { 1000.min(now.sensors_at_ms) };
        citizen.blocked_reason(&OwnerPolicyInput { idle, ..look(&now) }).is_some()
    };
    assert!(!rests(1, 99.0, false, true), "that is our own work");
    assert!(!rests(2, 99.0, true, true));
    assert!(!rests(14, 99.0, true, false), "the reading is an old one");
    assert!(rests(17, 99.0, true, true));
    assert!(rests(20, 99.0, true, false));
    assert!(!rests(32, 4.0, true, true));
}

#[test]
fn flotilla_s_own_processes_and_their_children_are_not_foreign() {
    let stat = |name: &str, parent: u32| format!("1 ({name}) S {parent} 1 1 0 -1");
    let files = [
        ("/sys/class/kfd/kfd/proc/100/vram_1", "4096".to_owned()),
        ("/sys/class/kfd/kfd/proc/200/vram_1", "4096".to_owned()),
        ("/sys/class/kfd/kfd/proc/300/vram_1", "4096".to_owned()),
        ("/sys/class/kfd/kfd/proc/400/vram_1", "4096".to_owned()),
        ("/sys/class/kfd/kfd/proc/self/vram_1", "4096".to_owned()),
        ("/proc/100/stat", stat("llama-server", 101)),
        ("/proc/101/stat", stat("flotilla", 1)),
        ("/proc/200/stat", stat("flotilla", 1)),
        ("/proc/300/stat", stat("a (b) flotilla", 301)),
        ("/proc/301/stat", stat("bash", 301)),
    ];
    let files: Vec<(&str, &str)> =
        files.iter().map(|(path, text)| (*path, text.as_str())).collect();
    let found = find_foreign_processes(&tree(&files), "flotilla");
    assert_eq!(
        found,
        [ForeignProcess { pid: 300, name: "a (b) flotilla".into() }],
        "400 cannot be looked up"
    );
}

#[test]
fn no_content_makes_the_look_at_processes_panic() {
    let mut random = fastrand::Rng::with_seed(3);
    for _ in 0..2000 {
        let text: String = (0..random.usize(..40))
            .map(|_| ['(', ')', ' ', '1', 'x', 'é'][random.usize(..6)])
            .collect();
        let files = [
            ("/sys/class/kfd/kfd/proc/1/x", ""),
            ("/proc/1/stat", text.as_str()),
            ("/proc/self/comm", ""),
        ];
        let files = tree(&files);
        find_foreign_processes(&files, &own_process_name(&files));
    }
}
