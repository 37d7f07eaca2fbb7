//! Memory in huge pages, for what is read from its start to its end.

use memmap2::MmapMut;

/// Maps zeroed memory. With small pages, looking up addresses takes a third of the time of reading;
/// if the system refuses huge ones, reading is only slower.
///
/// # Errors
/// When the system refuses the memory.
pub(crate) fn map_huge_pages(bytes: usize) -> std::io::Result<MmapMut> {
    let memory = MmapMut::map_anon(bytes)?;
    #[cfg(target_os = "linux")]
    let _ = memory.advise(memmap2::Advice::HugePage);
    Ok(memory)
}
