//! The engine that trains on a box.

use std::path::Path;

use agent::WorkerLauncher;
use anyhow::Context;
use trainer::{PyTorchProgram, PythonRunner, TrainingEngine};

use crate::settings::BurnInSettings;

/// Chooses the engine that trains, as an agent of this box does: PyTorch with the interpreter
/// `asked` for or, on a GPU, with the one of the stack `in_use` or what `find_python` finds without
/// it; otherwise the embedded engine. The inner error is the reason why a box with a GPU has none.
///
/// # Errors
/// When the interpreter `asked` for is unusable, or the training program cannot be written.
pub fn choose_engine(
    launch: &WorkerLauncher,
    asked: Option<&Path>,
    in_use: Option<&Path>,
    find_python: impl FnOnce(Option<&Path>) -> anyhow::Result<PythonRunner>,
) -> anyhow::Result<Result<TrainingEngine, String>> {
    if asked.is_none() && launch.profile.is_cpu() {
        return Ok(Ok(TrainingEngine::Candle));
    }
    let python = match find_python(asked.or(in_use)) {
        Ok(python) => python,
        Err(error) if asked.is_none() => return Ok(Err(format!("{error:#}"))),
        Err(error) => return Err(error),
    };
    let program = PyTorchProgram::write_program(python, &launch.directory);
    Ok(Ok(TrainingEngine::PyTorch(program.context("write the training program")?)))
}

/// Lets uv fetch the packages of an engine that it starts. The stage that trains reports a failure.
pub(crate) async fn fetch_engine(settings: &BurnInSettings, announce: &mut dyn FnMut(&str)) {
    if let Ok(TrainingEngine::PyTorch(program)) = &settings.engine
        && matches!(program.python, PythonRunner::Uv(_))
    {
        announce("fetch of PyTorch");
        let _ = trainer::fetch_packages(program, &settings.launch).await;
    }
}

/// Returns the interpreter of an engine, if it is known before the start.
pub(crate) fn find_interpreter(engine: &TrainingEngine) -> Option<&Path> {
    match engine {
        TrainingEngine::PyTorch(program) => match &program.python {
            PythonRunner::Interpreter(path) => Some(path),
            PythonRunner::Uv(_) => None,
        },
        TrainingEngine::Candle => None,
    }
}

#[cfg(test)]
mod tests {
    use anyhow::bail;

    use super::*;

    /// Takes a named interpreter, or else uv.
    fn find_python(named: Option<&Path>) -> anyhow::Result<PythonRunner> {
        Ok(named.map_or(PythonRunner::Uv("uv".into()), |path| {
            PythonRunner::Interpreter(path.to_owned())
        }))
    }

    fn find_none(_: Option<&Path>) -> anyhow::Result<PythonRunner> {
        bail!("install uv (E108)")
    }

    #[test]
    fn a_gpu_trains_with_the_python_of_its_agents_and_a_cpu_only_with_one_that_is_asked_for() {
        let directory = tempfile::tempdir().unwrap();
        let launch = |profile: &str| crate::test_launcher(directory.path(), profile);
        let (stack, own) = (Path::new("/stack/python"), Path::new("/own/python"));
        let python = |profile: &str, asked, in_use| {
            let engine = choose_engine(&launch(profile), asked, in_use, find_python);
            match engine.unwrap().unwrap() {
                TrainingEngine::Candle => None,
                TrainingEngine::PyTorch(program) => Some(program.python),
            }
        };
        let interpreter = |path: &Path| Some(PythonRunner::Interpreter(path.to_owned()));
        assert_eq!(python("cpu", None, Some(stack)), None);
        assert_eq!(python("cpu", Some(own), Some(stack)), interpreter(own));
        assert_eq!(python("rocm", None, None), Some(PythonRunner::Uv("uv".into())));
        assert_eq!(python("rocm", None, Some(stack)), interpreter(stack));
        assert_eq!(python("cuda", Some(own), Some(stack)), interpreter(own));
        let missing = choose_engine(&launch("rocm"), None, None, find_none).unwrap();
        assert_eq!(missing.unwrap_err(), "install uv (E108)");
        choose_engine(&launch("rocm"), Some(own), None, find_none).unwrap_err();
    }

    #[test]
    fn only_an_interpreter_is_known_before_the_start() {
        let directory = tempfile::tempdir().unwrap();
        let launch = crate::test_launcher(directory.path(), "rocm");
        let engine = |asked| choose_engine(&launch, asked, None, find_python).unwrap().unwrap();
        let own = Path::new("/own/python");
        assert_eq!(find_interpreter(&engine(Some(own))), Some(own));
        assert_eq!(find_interpreter(&engine(None)), None);
        assert_eq!(find_interpreter(&TrainingEngine::Candle), None);
    }
}
