//! Python: the conventions of its data sets, and programs that try to avoid judgement.

use serde_json::json;
use verifier::VerifyItem;
use wire::v1::verifier::{How, Limits, Pytest, Python};

use crate::rig::{box_with, item, judge_all, told};

const PROMPT: &str = "def double(x):\n    \"\"\"Twice x.\"\"\"\n";
const CHECK: &str =
    "def check(candidate):\n    assert candidate(2) == 4\n    assert candidate(5) == 10\n";

fn human(completion: &str) -> VerifyItem {
    item(PROMPT, completion, json!({ "test": CHECK, "entry_point": "double" }))
}

/// Limits the time, so that endless programs do not take long.
fn quick(partial: bool) -> How {
    let limits = Limits { timeout_s: 3.0, memory_mib: 256, ..Limits::default() };
    How::Python(Python { limits: Some(limits), partial, challenge: false })
}

/// Each would pass if its exit code, its output or its own report counted.
const ATTACKS: [(&str, &str); 22] = [
    ("exits early", "import sys\nsys.exit(0)\n"),
    ("exits when it is called", "import sys\ndef double(x):\n    sys.exit(0)\n"),
    ("exits without a word", "import os\nos._exit(0)\n"),
    ("exits without a word when it is called", "import os\ndef double(x):\n    os._exit(0)\n"),
    ("raises SystemExit", "def double(x):\n    raise SystemExit\n"),
    ("raises KeyboardInterrupt", "def double(x):\n    raise KeyboardInterrupt\n"),
    (
        "prints what a harness might",
        "print('done 1 1')\nprint('OK')\ndef double(x):\n    return 0\n",
    ),
    (
        "writes to every descriptor",
        "import os\nfor n in range(30):\n    try:\n        os.write(n, b' done 1 1 ')\n    except OSError:\n        pass\ndef double(x):\n    return 0\n",
    ),
    (
        "closes every descriptor",
        "import os\nos.closerange(0, 99)\ndef double(x):\n    return 2 * x\n",
    ),
    ("defines check", "def check(candidate):\n    pass\ndef double(x):\n    return 0\n"),
    (
        "is equal to anything",
        "class Any:\n    def __eq__(self, other):\n        return True\ndef double(x):\n    return Any()\n",
    ),
    (
        "is different from nothing",
        "class Any(int):\n    def __eq__(self, other):\n        return True\n    def __ne__(self, other):\n        return False\ndef double(x):\n    return Any()\n",
    ),
    (
        "replaces builtins",
        "import builtins\nbuiltins.exec = builtins.compile = lambda *a, **k: None\nbuiltins.len = lambda x: 0\ndef double(x):\n    return 0\n",
    ),
    (
        "replaces AssertionError",
        "import builtins\nclass Never(Exception):\n    pass\nbuiltins.AssertionError = Never\nAssertionError = Never\ndef double(x):\n    return 0\n",
    ),
    (
        "replaces what the harness writes with",
        "import os\nos.write = os._exit = lambda *a: None\ndef double(x):\n    return 0\n",
    ),
    (
        "leaves by a signal",
        "import os, signal\ndef double(x):\n    os.kill(os.getpid(), signal.SIGTERM)\n",
    ),
    (
        "ends in a thread",
        "import threading, os\nthreading.Thread(target=lambda: os._exit(0)).start()\ndef double(x):\n    while True:\n        pass\n",
    ),
    ("never ends", "def double(x):\n    while True:\n        pass\n"),
    ("recurses for ever", "def double(x):\n    return double(x)\n"),
    ("takes all memory", "def double(x):\n    return len(bytearray(4 << 30))\n"),
    ("is no Python", "def double(x) return 2 * x\n"),
    ("says nothing", ""),
];

#[test]
fn a_program_that_would_rather_not_be_judged_fails() {
    let Some(toolchain) = box_with("python") else { return };
    let items: Vec<VerifyItem> = ATTACKS.iter().map(|(_, code)| human(code)).collect();
    let verdicts = judge_all(toolchain, quick(false), &items);
    for ((name, _), verdict) in ATTACKS.iter().zip(&verdicts) {
        let (outcome, reward, detail) = told(verdict);
        assert_eq!((outcome, reward), ("fail", 0.0), "{name}: {detail}");
        assert!(!detail.is_empty(), "{name}");
    }
}

#[test]
fn honest_programs_pass_whatever_they_do_besides() {
    let Some(toolchain) = box_with("python") else { return };
    let honest = [
        "    return 2 * x\n",
        "def double(x):\n    return 2 * x\n\nif __name__ == '__main__':\n    print(double(int(input())))\n",
        "import sys\nprint('x' * 3000000)\nprint('y', file=sys.stderr)\ndef double(x):\n    return 2 * x\n",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,)).start()\ndef double(x):\n    return 2 * x\n",
        "from dataclasses import dataclass\n@dataclass\nclass Two:\n    n: int = 2\ndef double(x):\n    return Two().n * x\n",
        "import subprocess, sys\ndef double(x):\n    code = f'print(2 * {x})'\n    return int(subprocess.check_output([sys.executable, '-c', code]))\n",
        "def double(x):\n    open('note', 'w').write(str(2 * x))\n    return int(open('note').read())\n",
    ];
    let items: Vec<VerifyItem> = honest.iter().map(|code| human(code)).collect();
    let how = How::Python(Python::default());
    for (code, verdict) in honest.iter().zip(judge_all(toolchain, how, &items)) {
        assert_eq!(told(&verdict), ("pass", 1.0, ""), "{code}");
    }
}

#[test]
fn mbpp_s_asserts_pay_in_part_if_that_is_wanted() {
    let Some(toolchain) = box_with("python") else { return };
    let fields = json!({
        "test_list": ["assert double(0) == 0", "assert double(k) == 2", "assert double(2) == 4"],
        "test_setup_code": "k = one()",
    });
    let code = "```python\ndef one():\n    return 1\ndef double(x):\n    return x * x * 2\n```";
    let half = item("Write a function double.", code, fields.clone());
    let right = code.replace("x * x * 2", "2 * x");
    let right = item("Write a function double.", &right, fields);
    let items = [half, right];
    let strict = judge_all(toolchain.clone(), quick(false), &items);
    assert_eq!((told(&strict[0]).0, told(&strict[0]).1), ("fail", 0.0));
    assert!(strict[0].detail.contains("assert double(2) == 4"), "{}", strict[0].detail);
    assert_eq!(told(&strict[1]).0, "pass");
    let partial = judge_all(toolchain, quick(true), &items);
    assert!((partial[0].reward - 2.0 / 3.0).abs() < 1e-9, "{:?}", partial[0]);
}

#[test]
fn a_prompt_whose_tests_are_no_python_is_the_verifiers_error() {
    let Some(toolchain) = box_with("python") else { return };
    let item = item("", "x = 1", json!({ "tests": ["assert x ="] }));
    let [verdict] = &judge_all(toolchain, quick(false), &[item])[..] else { panic!("one verdict") };
    let (outcome, reward, detail) = told(verdict);
    assert_eq!((outcome, reward), ("error", 0.0));
    assert!(detail.contains("SyntaxError"), "{detail}");
}

#[test]
fn pytest_counts_every_test_and_a_skipped_one_as_not_passed() {
    let Some(toolchain) = box_with("pytest") else { return };
    let tests = "\
from solution import double
import pytest

@pytest.mark.parametrize('x', [0, 1, 2])
def test_double(x):
    assert double(x) == 2 * x

def test_negative():
    assert double(-1) == -2
";
    let with = |code: &str| item("Write double.", code, json!({ "tests": tests }));
    let items = [
        with("def double(x):\n    return 2 * x\n"),
        with("def double(x):\n    return 2 * abs(x)\n"),
        with("import pytest\ndef double(x):\n    pytest.skip('not today')\n"),
        with("import os\nos._exit(0)\n"),
        with("def double(x):\n    import os\n    os._exit(0)\n"),
        with("def triple(x):\n    return 3 * x\n"),
        with("import pytest\npytest.exit('done', 0)\n"),
    ];
    let how = How::Pytest(Pytest { partial: true, ..Pytest::default() });
    let verdicts = judge_all(toolchain, how, &items);
    assert_eq!(told(&verdicts[0]), ("pass", 1.0, ""));
    assert_eq!(verdicts[1].reward.to_bits(), 0.75_f64.to_bits(), "{:?}", verdicts[1]);
    for verdict in &verdicts[2..] {
        let (outcome, reward, detail) = told(verdict);
        assert_eq!((outcome, reward), ("fail", 0.0), "{detail}");
    }
}
