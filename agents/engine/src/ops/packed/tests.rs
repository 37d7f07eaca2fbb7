use super::{
    Bf16Rows, LeftFactor, MatmulKernel, MatmulPhase, PackedProjection, ProjectionInputs,
    RightFactor, multiply_packed, project_packed,
};
use crate::random::RandomStream;
use half::bf16;

/// Rows of activations, columns, inner: whole tiles, less than one, more than one of everything.
const SHAPES: [(usize, usize, usize); 8] = [
    (1, 16, 32),
    (1, 20, 40),
    (5, 33, 100),
    (16, 48, 16),
    (17, 64, 64),
    (33, 260, 130),
    (70, 300, 1201),
    (1030, 17, 33),
];

fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut random = RandomStream::new(seed);
    (0..count).map(|_| random.next_normal() as f32).collect()
}

fn narrow(values: &[f32]) -> Vec<bf16> {
    values.iter().map(|value| bf16::from_f32(*value)).collect()
}

fn ways() -> impl Iterator<Item = (MatmulKernel, MatmulPhase)> {
    MatmulKernel::available_kernels()
        .flat_map(|kernel| [(kernel, MatmulPhase::Prefill), (kernel, MatmulPhase::Decode)])
}

/// Computes in f64, `[rows, inner] · [inner, columns]`.
fn naive(
    (rows, columns, inner): (usize, usize, usize),
    left: impl Fn(usize, usize) -> f32,
    right: impl Fn(usize, usize) -> f32,
) -> Vec<f64> {
    let narrowed = |value: f32| bf16::from_f32(value).to_f64();
    let element = |at: usize| {
        let (row, column) = (at / columns, at % columns);
        (0..inner).map(|i| narrowed(left(row, i)) * narrowed(right(i, column))).sum()
    };
    (0..rows * columns).map(element).collect()
}

#[track_caller]
fn assert_close(ours: &[f32], exact: &[f64], what: &str) {
    assert_eq!(ours.len(), exact.len());
    for (at, (ours, exact)) in ours.iter().zip(exact).enumerate() {
        let near = (f64::from(*ours) - exact).abs() < 1e-3;
        assert!(near, "{what}: element {at} is {ours}, not {exact}");
    }
}

#[test]
fn every_kernel_projects_as_the_definition_says() {
    for (kernel, phase) in ways() {
        for shape @ (rows, columns, inner) in SHAPES {
            let (x, bias) = (values(rows * inner, 1), values(columns, 3));
            let weight = values(columns * inner, 2);
            let (more, more_weight) = (values(rows * 7, 4), values(columns * 7, 5));
            let (narrowed, more_narrowed) = (narrow(&weight), narrow(&more_weight));
            let inputs = [
                ProjectionInputs::new(kernel, phase, &x, inner),
                ProjectionInputs::new(kernel, phase, &more, 7),
            ];
            let terms = vec![
                (&inputs[0], Bf16Rows::new(&narrowed, inner)),
                (&inputs[1], Bf16Rows::new(&more_narrowed, 7)),
            ];
            let mut out = vec![f32::NAN; rows * columns];
            project_packed(vec![PackedProjection { out: &mut out, terms, bias: Some(&bias) }]);
            let first = naive(shape, |r, i| x[r * inner + i], |i, c| weight[c * inner + i]);
            let shape = (rows, columns, 7);
            let second = naive(shape, |r, i| more[r * 7 + i], |i, c| more_weight[c * 7 + i]);
            let sums = first.iter().zip(second).zip(bias.iter().cycle());
            let exact: Vec<f64> = sums.map(|((a, b), bias)| a + b + f64::from(*bias)).collect();
            assert_close(&out, &exact, &format!("{kernel:?} {phase:?} {shape:?}"));
        }
    }
}

#[test]
fn every_kernel_mixes_as_the_definition_says() {
    for kernel in MatmulKernel::available_kernels() {
        for shape @ (rows, columns, inner) in SHAPES {
            let what = format!("{kernel:?} {shape:?}");
            let (x, weight) = (values(rows * inner, 1), values(inner * columns, 2));
            let narrowed = narrow(&weight);
            let left = LeftFactor::new(kernel, &x, inner);
            let mut out = vec![f32::NAN; rows * columns];
            let right = RightFactor::Bf16(Bf16Rows::new(&narrowed, columns));
            multiply_packed(
                &mut out,
                columns,
                &[(&left, right), (&left, RightFactor::F32(&weight))],
            );
            let once = naive(shape, |r, i| x[r * inner + i], |i, c| weight[i * columns + c]);
            assert_close(&out, &once.iter().map(|sum| 2.0 * sum).collect::<Vec<_>>(), &what);
            // The same for a transposed left factor.
            let turned: Vec<f32> =
                (0..inner * rows).map(|at| x[at % rows * inner + at / rows]).collect();
            let left = LeftFactor::from_transposed(kernel, &turned, rows);
            multiply_packed(&mut out, columns, &[(&left, RightFactor::F32(&weight))]);
            assert_close(&out, &once, &what);
        }
    }
}

#[test]
fn no_kernel_s_sums_depend_on_company_or_threads() {
    let (columns, inner) = (100, 1100);
    let weight = narrow(&values(columns * inner, 2));
    let x = values(150 * inner, 1);
    for (kernel, phase) in ways() {
        let project = |first: usize, rows: usize| {
            let inputs = ProjectionInputs::new(
                kernel,
                phase,
                &x[first * inner..(first + rows) * inner],
                inner,
            );
            let mut out = vec![f32::NAN; rows * columns];
            let terms = vec![(&inputs, Bf16Rows::new(&weight, inner))];
            project_packed(vec![PackedProjection { out: &mut out, terms, bias: None }]);
            out
        };
        let all = project(0, 150);
        for (first, rows) in [(0, 1), (7, 2), (31, 16), (100, 17), (3, 64), (49, 101)] {
            let alone = project(first, rows);
            let same = alone == all[first * columns..(first + rows) * columns];
            assert!(same, "{kernel:?} {phase:?}: {rows} rows from {first}");
        }
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert!(
                pool.install(|| project(0, 150)) == all,
                "{kernel:?} {phase:?}: {threads} threads"
            );
        }
    }
}

#[test]
fn a_row_has_one_sum_in_whichever_way_dot_products_multiply_it() {
    // Only this kernel chooses by the number of rows.
    let Some(kernel) =
        MatmulKernel::available_kernels().find(|kernel| format!("{kernel:?}") == "Avx512")
    else {
        return;
    };
    let (columns, inner) = (100, 1201);
    let (weight, bias) = (narrow(&values(columns * inner, 2)), values(columns, 3));
    let x = values(20 * inner, 1);
    let project = |rows: usize| {
        let inputs = ProjectionInputs::new(kernel, MatmulPhase::Decode, &x[..rows * inner], inner);
        let mut out = vec![f32::NAN; rows * columns];
        let terms = vec![(&inputs, Bf16Rows::new(&weight, inner))];
        project_packed(vec![PackedProjection { out: &mut out, terms, bias: Some(&bias) }]);
        out
    };
    let all = project(20);
    for rows in 1..20 {
        assert!(project(rows) == all[..rows * columns], "{rows} rows");
    }
}

#[test]
fn numbers_become_the_nearest_bf16_and_what_is_none_stays_none() {
    use super::tiles::Bf16Source;
    let mut random = RandomStream::new(1);
    let cases = (0..100_000).map(|_| f32::from_bits(random.next_u64() as u32));
    let edges = [0.0, -0.0, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, 1e-40, f32::NAN];
    for value in cases.chain(edges) {
        let (ours, theirs) = (bf16::from_bits(value.bf16_bits()), bf16::from_f32(value));
        let same = ours == theirs || (ours.is_nan() && theirs.is_nan());
        assert!(same, "{value} ({:x}) became {ours}, not {theirs}", value.to_bits());
    }
}

#[test]
fn an_infinite_weight_stays_where_it_is() {
    for (kernel, phase) in ways() {
        let mut weight = vec![bf16::ONE; 20 * 40];
        weight[19 * 40 + 39] = bf16::INFINITY;
        let inputs = ProjectionInputs::new(kernel, phase, &[1.0; 3 * 40], 40);
        let mut out = vec![f32::NAN; 3 * 20];
        let terms = vec![(&inputs, Bf16Rows::new(&weight, 40))];
        project_packed(vec![PackedProjection { out: &mut out, terms, bias: None }]);
        for row in out.chunks_exact(20) {
            assert!(row[..19].iter().all(|sum| *sum == 40.0), "{kernel:?} {phase:?}: {row:?}");
            assert_eq!(row[19], f32::INFINITY, "{kernel:?} {phase:?}");
        }
    }
}
