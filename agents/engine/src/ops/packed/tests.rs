use super::{
    Bf16Rows, LeftFactor, MatmulKernel, MatmulPhase, PackedMatrix, PackedProjection,
    ProjectionInputs, ProjectionWeight, RightFactor, multiply_packed, project_packed,
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

/// A way to project: kernel, phase, and whether the weights are packed before.
#[derive(Debug, Clone, Copy)]
struct Way {
    kernel: MatmulKernel,
    phase: MatmulPhase,
    packed: bool,
}

fn ways() -> impl Iterator<Item = Way> {
    let phases = [MatmulPhase::Prefill, MatmulPhase::Decode];
    MatmulKernel::available_kernels().flat_map(move |kernel| {
        phases
            .into_iter()
            .flat_map(move |phase| [false, true].map(|packed| Way { kernel, phase, packed }))
    })
}

/// Rows of activations and rows of weights, of the same width.
type Factors<'a> = (&'a [f32], &'a [bf16], usize);

impl Way {
    fn project(self, columns: usize, factors: &[Factors<'_>], bias: Option<&[f32]>) -> Vec<f32> {
        let Self { kernel, phase, packed } = self;
        let rows: Vec<_> = factors.iter().map(|(_, w, width)| Bf16Rows::new(w, *width)).collect();
        let tiles = PackedMatrix::pack_all(kernel, &rows, |_| ()).unwrap();
        let inputs = factors.iter().map(|(x, _, width)| match packed {
            true => ProjectionInputs::for_packed_weights(kernel, x, *width),
            false => ProjectionInputs::new(kernel, phase, x, *width),
        });
        let inputs: Vec<_> = inputs.collect();
        let weights = rows.iter().zip(&tiles).map(|(rows, tiles)| match packed {
            true => ProjectionWeight::Packed(tiles),
            false => ProjectionWeight::Rows(*rows),
        });
        let (x, _, width) = factors[0];
        let mut out = vec![f32::NAN; x.len() / width * columns];
        let terms = inputs.iter().zip(weights).collect();
        project_packed(vec![PackedProjection { out: &mut out, terms, bias }]);
        out
    }
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
    for way in ways() {
        for shape @ (rows, columns, inner) in SHAPES {
            let (x, bias) = (values(rows * inner, 1), values(columns, 3));
            let weight = values(columns * inner, 2);
            let (more, more_weight) = (values(rows * 7, 4), values(columns * 7, 5));
            let (narrowed, more_narrowed) = (narrow(&weight), narrow(&more_weight));
            let factors = [(&x[..], &narrowed[..], inner), (&more, &more_narrowed, 7)];
            let out = way.project(columns, &factors, Some(&bias));
            let first = naive(shape, |r, i| x[r * inner + i], |i, c| weight[c * inner + i]);
            let shape = (rows, columns, 7);
            let second = naive(shape, |r, i| more[r * 7 + i], |i, c| more_weight[c * 7 + i]);
            let sums = first.iter().zip(second).zip(bias.iter().cycle());
            let exact: Vec<f64> = sums.map(|((a, b), bias)| a + b + f64::from(*bias)).collect();
            assert_close(&out, &exact, &format!("{way:?} {shape:?}"));
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
    let x = values(550 * inner, 1);
    for way in ways() {
        let project = |first: usize, rows: usize| {
            let x = &x[first * inner..(first + rows) * inner];
            way.project(columns, &[(x, &weight, inner)], None)
        };
        let all = project(0, 550);
        for (first, rows) in [(0, 1), (7, 2), (31, 16), (100, 17), (3, 64), (499, 51)] {
            let alone = project(first, rows);
            let same = alone == all[first * columns..(first + rows) * columns];
            assert!(same, "{way:?}: {rows} rows from {first}");
        }
        for threads in [1, 3] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            assert!(pool.install(|| project(0, 550)) == all, "{way:?}: {threads} threads");
        }
    }
}

#[test]
fn a_row_has_one_sum_in_whichever_way_avx512_multiplies_it() {
    // Only this kernel chooses by the number of rows, and has one order of sums for all ways.
    let (columns, inner) = (100, 1201);
    let (weight, bias) = (narrow(&values(columns * inner, 2)), values(columns, 3));
    let x = values(20 * inner, 1);
    let mut first = None;
    for way in ways().filter(|way| format!("{:?}", way.kernel) == "Avx512") {
        let project = |rows: usize| {
            way.project(columns, &[(&x[..rows * inner], &weight, inner)], Some(&bias))
        };
        let all = project(20);
        for rows in 1..20 {
            assert!(project(rows) == all[..rows * columns], "{way:?}: {rows} rows");
        }
        assert!(*first.get_or_insert_with(|| all.clone()) == all, "{way:?}");
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
    for way in ways() {
        let mut weight = vec![bf16::ONE; 20 * 40];
        weight[19 * 40 + 39] = bf16::INFINITY;
        let out = way.project(20, &[(&[1.0; 3 * 40], &weight, 40)], None);
        for row in out.chunks_exact(20) {
            assert!(row[..19].iter().all(|sum| *sum == 40.0), "{way:?}: {row:?}");
            assert_eq!(row[19], f32::INFINITY, "{way:?}");
        }
    }
}

#[test]
fn parts_of_packed_weights_are_the_columns_that_they_name() {
    let (columns, inner) = (70, 100);
    let weight = narrow(&values(columns * inner, 2));
    let x = values(3 * inner, 1);
    let kernel = MatmulKernel::Portable;
    let rows = Bf16Rows::new(&weight, inner);
    let whole = PackedMatrix::pack_all(kernel, &[rows, rows], |_| ()).unwrap().remove(1);
    let project = |weight: &PackedMatrix, columns: usize| {
        let inputs = ProjectionInputs::for_packed_weights(kernel, &x, inner);
        let mut out = vec![f32::NAN; 3 * columns];
        let terms = vec![(&inputs, ProjectionWeight::Packed(weight))];
        project_packed(vec![PackedProjection { out: &mut out, terms, bias: None }]);
        out
    };
    let all = project(&whole, columns);
    for part in [0..70, 16..48, 64..70, 32..33] {
        let sums = project(&whole.slice_columns(&part).unwrap(), part.len());
        let rows = all.chunks_exact(columns).flat_map(|row| &row[part.clone()]);
        assert!(sums.iter().eq(rows), "{part:?}");
    }
    assert!(whole.slice_columns(&(8..16)).is_none());
    assert!(whole.slice_columns(&(64..71)).is_none());
}
