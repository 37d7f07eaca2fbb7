//! Compiled languages, and programs that read stdin and write stdout.

use serde_json::json;
use verifier::VerifyItem;
use wire::v1::verifier::{Compile, How, Limits, Stdio};

use crate::rig::{and, box_with, cases, item, judge_all, told};

/// Programs that print twice the number they read, by language.
const DOUBLES: [(&str, &str); 5] = [
    ("python", "print(2 * int(input()))\n"),
    (
        "c",
        "#include <stdio.h>\nint main(void) { int x; return scanf(\"%d\", &x) != 1 || printf(\"%d\\n\", 2 * x) < 0; }\n",
    ),
    (
        "c++",
        "#include <iostream>\nint main() { int x; std::cin >> x; std::cout << 2 * x << \"\\n\"; }\n",
    ),
    (
        "rust",
        "use std::io;\nfn main() {\n    let mut s = String::new();\n    io::stdin().read_line(&mut s).unwrap();\n    println!(\"{}\", 2 * s.trim().parse::<i64>().unwrap());\n}\n",
    ),
    (
        "go",
        "package main\n\nimport \"fmt\"\n\nfunc main() {\n\tvar x int\n\tfmt.Scan(&x)\n\tfmt.Println(2 * x)\n}\n",
    ),
];

#[test]
fn each_language_answers_its_cases_by_field_or_by_fence() {
    for (language, code) in DOUBLES {
        let Some(toolchain) = box_with(language) else { continue };
        let fields = cases([("2\n", "4"), ("21", "42\n")]);
        let items = [
            item("", code, and(fields.clone(), json!({ "language": language }))),
            item("", &format!("So:\n```{language}\n{code}```\n"), fields.clone()),
            item("", &code.replace('2', "3"), and(fields, json!({ "language": language }))),
        ];
        let verdicts = judge_all(toolchain, How::Stdio(Stdio::default()), &items);
        for verdict in &verdicts[..2] {
            assert_eq!(told(verdict), ("pass", 1.0, ""), "{language}");
        }
        let (outcome, reward, detail) = told(&verdicts[2]);
        assert_eq!((outcome, reward), ("fail", 0.0), "{language}: {detail}");
    }
}

#[test]
fn a_program_that_misbehaves_fails_its_case() {
    let Some(toolchain) = box_with("python") else { return };
    let limits = Limits { timeout_s: 2.0, memory_mib: 256, output_kib: 64, ..Limits::default() };
    let how = How::Stdio(Stdio { limits: Some(limits), partial: true, ..Stdio::default() });
    let fields = and(cases([("1", "1"), ("2", "2")]), json!({ "language": "python" }));
    let with = |code: &str| item("", code, fields.clone());
    let items = [
        with("while True: pass"),
        with("while True: print('x' * 1000)"),
        with("x = bytearray(1 << 30)"),
        with("import os\nwhile True: os.fork()"),
        with("print(input())\nexit(1)"),
        with("print(1)"),
    ];
    let verdicts = judge_all(toolchain, how, &items);
    for (item, verdict) in items.iter().zip(&verdicts).take(5) {
        let (outcome, reward, detail) = told(verdict);
        assert_eq!((outcome, reward), ("fail", 0.0), "{}: {detail}", item.completion);
    }
    assert_eq!(verdicts[5].reward.to_bits(), 0.5_f64.to_bits(), "{:?}", verdicts[5]);
}

/// Rewards of a C program, with cases and without.
const RUNGS: [(&str, f64, f64); 6] = [
    ("int main(void) { return x; }", 0.0, 0.0),
    ("#include <stdlib.h>\nint main(void) { int unused; abort(); }", 0.3, 0.3),
    ("#include <stdlib.h>\nint main(void) { abort(); }", 0.5, 0.5),
    ("int main(void) { return 0; }", 0.7, 0.7),
    ("#include <stdio.h>\nint main(void) { puts(\"1\"); return 0; }", 0.85, 0.7),
    ("#include <stdio.h>\nint main(void) { int c = getchar(); putchar(c); return 0; }", 1.0, 0.7),
];

#[test]
fn a_compiled_program_is_paid_for_how_far_it_gets() {
    let Some(toolchain) = box_with("c") else { return };
    let fields = and(cases([("1", "1"), ("2", "2")]), json!({ "language": "c" }));
    let items = |fields: &serde_json::Value| -> Vec<VerifyItem> {
        RUNGS.iter().map(|(code, ..)| item("", code, fields.clone())).collect()
    };
    let how = How::Compile(Compile { run: true, ..Compile::default() });
    let answered = judge_all(toolchain.clone(), how.clone(), &items(&fields));
    let alone = json!({ "language": "c" });
    let ran = judge_all(toolchain.clone(), how, &items(&alone));
    let compiled = judge_all(toolchain, How::Compile(Compile::default()), &items(&alone));
    for (n, (code, with_cases, without)) in RUNGS.iter().enumerate() {
        let close = |found: f64, expected: f64| (found - expected).abs() < 1e-9;
        assert!(close(answered[n].reward, *with_cases), "{code}: {:?}", answered[n]);
        assert!(close(ran[n].reward, *without), "{code}: {:?}", ran[n]);
        assert!(close(compiled[n].reward, without.min(0.5)), "{code}: {:?}", compiled[n]);
    }
    let passed = |verdicts: &[wire::v1::verdicts::Verdict]| {
        verdicts.iter().filter(|verdict| told(verdict).0 == "pass").count()
    };
    assert_eq!((passed(&answered), passed(&ran), passed(&compiled)), (1, 3, 5));
}

#[test]
fn a_language_this_box_lacks_is_an_error_and_one_nobody_knows_is_the_samples_fault() {
    let Some(mut toolchain) = box_with("python") else { return };
    toolchain.tools.0.remove("go");
    let fields = cases([("", "")]);
    let items = [
        item("", "```go\npackage main\n```", fields.clone()),
        item("", "```brainfuck\n+\n```", fields.clone()),
        item("", "x", and(fields, json!({ "language": "cobol" }))),
    ];
    let verdicts = judge_all(toolchain, How::Stdio(Stdio::default()), &items);
    let outcomes: Vec<&str> = verdicts.iter().map(|verdict| told(verdict).0).collect();
    assert_eq!(outcomes, ["error", "fail", "error"]);
    assert!(verdicts[0].detail.contains("go.dev"), "{:?}", verdicts[0]);
}
