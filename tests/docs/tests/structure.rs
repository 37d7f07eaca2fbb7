//! The structure of the source: files that import each other in circles, and the sizes of the
//! program and its pages. Printed with `--no-capture`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
};

use docs::{is_test, program_sources, root};
use syn::{Item, UseTree, Visibility, visit::Visit};

/// Most files that may import each other in a circle inside their crate.
const CIRCLE_FILES_MAX: usize = 10;
/// Most lines of the program's own crates, `cli` and `flotilla`.
const PROGRAM_LINES_MAX: usize = 14_600;
/// Most words of the pages outside of `docs/adr` that people write.
const PAGE_WORDS_MAX: usize = 41_000;
/// Pages that programs write. Each says so in its third line.
const GENERATED_PAGES: [&str; 3] = ["PERFORMANCE.md", "RAFT-FIGURES.md", "SPEC.md"];

/// A module path inside a crate, such as `["select", "rules"]`. The root module is empty.
type ModulePath = Vec<String>;

/// The names of one file: those that it defines, and the paths that it mentions.
#[derive(Default)]
struct Names {
    definitions: BTreeSet<String>,
    /// Names that `pub use` gives to others, with their paths.
    exports: BTreeMap<String, Vec<String>>,
    /// Private imports, by the name that they get here.
    imports: BTreeMap<String, Vec<String>>,
    /// Paths with at least two segments, outside of imports.
    paths: BTreeSet<Vec<String>>,
}

impl Names {
    fn read(text: &str) -> Self {
        let mut file = syn::parse_file(text).expect("Rust");
        file.items.retain(|item| !matches!(item, Item::Mod(module) if is_test(&module.attrs)));
        let mut names = Self::default();
        names.visit_file(&file);
        names
    }

    fn add_tree(&mut self, tree: &UseTree, before: &[String], is_public: bool) {
        let with = |name: &syn::Ident| [before, &[name.to_string()]].concat();
        let (name, path) = match tree {
            UseTree::Path(inner) => {
                return self.add_tree(&inner.tree, &with(&inner.ident), is_public);
            }
            UseTree::Group(group) => {
                return group.items.iter().for_each(|tree| self.add_tree(tree, before, is_public));
            }
            UseTree::Name(it) if it.ident == "self" => {
                (before.last().cloned().unwrap_or_default(), before.to_vec())
            }
            UseTree::Name(it) => (it.ident.to_string(), with(&it.ident)),
            UseTree::Rename(it) => (it.rename.to_string(), with(&it.ident)),
            UseTree::Glob(_) => ("*".to_owned(), before.to_vec()),
        };
        let to = if is_public { &mut self.exports } else { &mut self.imports };
        to.insert(name, path);
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast Item) {
        let name = match item {
            Item::Fn(it) => Some(&it.sig.ident),
            Item::Struct(it) => Some(&it.ident),
            Item::Enum(it) => Some(&it.ident),
            Item::Trait(it) => Some(&it.ident),
            Item::Type(it) => Some(&it.ident),
            Item::Const(it) => Some(&it.ident),
            Item::Static(it) => Some(&it.ident),
            _ => None,
        };
        self.definitions.extend(name.map(ToString::to_string));
        syn::visit::visit_item(self, item);
    }

    fn visit_item_use(&mut self, item: &'ast syn::ItemUse) {
        self.add_tree(&item.tree, &[], !matches!(item.vis, Visibility::Inherited));
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.segments.len() > 1 {
            self.paths.insert(path.segments.iter().map(|it| it.ident.to_string()).collect());
        }
        syn::visit::visit_path(self, path);
    }
}

/// The files of one crate.
struct Crate {
    modules: BTreeMap<ModulePath, Names>,
}

impl Crate {
    /// Makes a path absolute that `module` mentions. `None` for paths into other crates.
    fn absolute(&self, module: &[String], path: &[String]) -> Option<Vec<String>> {
        let supers = path.iter().take_while(|it| *it == "super").count();
        match path.first()?.as_str() {
            "crate" => Some(path[1..].to_vec()),
            "self" => Some([module, &path[1..]].concat()),
            "super" => {
                Some([&module[..module.len().checked_sub(supers)?], &path[supers..]].concat())
            }
            first => {
                let names = &self.modules[module];
                if let Some(import) =
                    names.imports.get(first).filter(|it| it.first() != path.first())
                {
                    return self.absolute(module, &[import, &path[1..]].concat());
                }
                let inside = [module, path].concat();
                self.modules.contains_key(&inside[..=module.len()]).then_some(inside)
            }
        }
    }

    /// Finds the module that defines what an absolute path names, through re-exports.
    fn definer(&self, path: &[String], depth: usize) -> Option<ModulePath> {
        let length = (0..=path.len()).rev().find(|at| self.modules.contains_key(&path[..*at]))?;
        let (module, rest) = path.split_at(length);
        let Some(first) = rest.first() else { return Some(module.to_vec()) };
        let names = &self.modules[module];
        match names.exports.get(first) {
            Some(export) if depth < 8 && !names.definitions.contains(first) => {
                let export = self.absolute(module, export)?;
                self.definer(&[&export, &rest[1..]].concat(), depth + 1)
            }
            _ => Some(module.to_vec()),
        }
    }

    /// The modules whose items a module uses, but for its own submodules.
    fn used(&self, module: &ModulePath) -> BTreeSet<ModulePath> {
        let names = &self.modules[module];
        let imports = names.imports.values().filter(|path| {
            // An imported module alone is no use; the paths that begin with it are.
            self.absolute(module, path).is_none_or(|it| !self.modules.contains_key(&it))
        });
        let mentioned = imports.chain(&names.paths).filter_map(|it| self.absolute(module, it));
        let definers = mentioned.filter_map(|it| self.definer(&it, 0));
        definers.filter(|it| !it.starts_with(module)).collect()
    }

    /// The modules that reach themselves, each with what it uses directly of the circle.
    fn circles(&self) -> BTreeMap<ModulePath, BTreeSet<ModulePath>> {
        let used: BTreeMap<&ModulePath, BTreeSet<ModulePath>> =
            self.modules.keys().map(|module| (module, self.used(module))).collect();
        let reach = |from: &ModulePath| {
            let (mut reached, mut open) = (BTreeSet::new(), vec![from]);
            while let Some(module) = open.pop() {
                open.extend(used[module].iter().filter(|it| reached.insert((*it).clone())));
            }
            reached
        };
        let reached: BTreeMap<&ModulePath, _> =
            self.modules.keys().map(|module| (module, reach(module))).collect();
        let in_circle = self.modules.keys().filter(|module| reached[module].contains(*module));
        in_circle
            .map(|module| {
                let back = used[module].iter().filter(|it| reached[it].contains(module));
                (module.clone(), back.cloned().collect())
            })
            .collect()
    }
}

/// Every crate of the program, by its folder.
fn crates() -> BTreeMap<String, Crate> {
    let mut crates: BTreeMap<String, Crate> = BTreeMap::new();
    for (name, text) in program_sources() {
        let (folder, file) = name.split_once("/src/").expect("a source of a crate");
        let mut module: ModulePath =
            file.trim_end_matches(".rs").split('/').map(str::to_owned).collect();
        if module == ["lib"] || module == ["main"] {
            module.clear();
        }
        let all =
            crates.entry(folder.to_owned()).or_insert_with(|| Crate { modules: BTreeMap::new() });
        all.modules.insert(module, Names::read(&text));
    }
    assert!(crates.len() > 25, "these are not all: {}", crates.len());
    crates
}

#[test]
fn files_of_a_crate_import_each_other_one_way() {
    let mut files = 0;
    for (name, members) in crates() {
        for (module, used) in members.circles() {
            files += 1;
            let used: Vec<String> = used.iter().map(|it| it.join("::")).collect();
            println!("{name}: {} uses {}, which uses it", module.join("::"), used.join(", "));
        }
    }
    println!("files in circles inside a crate: {files}");
    assert!(files <= CIRCLE_FILES_MAX, "{files} files in circles, at most {CIRCLE_FILES_MAX}");
}

#[test]
fn the_program_and_its_pages_stay_small() {
    let sources = program_sources();
    let lines = |folders: &[&str]| {
        let is_in = |name: &str| folders.iter().any(|it| name.starts_with(&format!("{it}/")));
        let texts = sources.iter().filter(|(name, _)| is_in(name)).map(|(_, text)| text);
        let programs = texts.map(|text| {
            // A declaration of a module in another file ends no program.
            let ends = |(at, _): &(usize, &str)| {
                text[*at..].lines().nth(1).is_some_and(|line| line.ends_with('{'))
            };
            let end =
                text.match_indices("#[cfg(test)]\nmod ").find(ends).map_or(text.len(), |it| it.0);
            text[..end].lines().count()
        });
        programs.sum::<usize>()
    };
    let pages =
        fs::read_dir(root().join("docs")).expect("docs").map(|it| it.expect("a page").path());
    let own = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"];
    let pages = pages.chain(own.map(|name| root().join(name)));
    let pages = pages.filter(|path| path.extension().is_some_and(|it| it == "md"));
    let words: usize = pages
        .map(|path| {
            let text = fs::read_to_string(&path).expect("a page");
            let is_generated = GENERATED_PAGES.iter().any(|name| path.ends_with(name));
            let third = text.lines().nth(2).unwrap_or_default();
            let path = path.display();
            assert_eq!(third.starts_with("Generated by `"), is_generated, "{path}");
            if is_generated { 0 } else { count_words(&text) }
        })
        .sum();
    let (program, all) =
        (lines(&["services/cli", "services/flotilla"]), lines(&["services", "agents", "proto"]));
    println!(
        "lines of cli and flotilla: {program}\nlines of source: {all}\nwords of pages: {words}"
    );
    assert!(program > 5000 && all > 50_000, "these are not all: {program}, {all}");
    assert!(program <= PROGRAM_LINES_MAX, "cli and flotilla: {program} lines");
    assert!(words <= PAGE_WORDS_MAX, "pages: {words} words");
}

/// Counts what has a letter or a digit: no bars of tables, no dashes of lists.
fn count_words(text: &str) -> usize {
    text.split_whitespace().filter(|it| it.contains(char::is_alphanumeric)).count()
}

/// Our crates among the dependencies of each crate's manifest.
fn dependencies() -> BTreeMap<String, BTreeSet<String>> {
    let manifests = crates().into_keys().map(|folder| {
        let text = fs::read_to_string(root().join(folder).join("Cargo.toml")).expect("a manifest");
        let name = text.split('"').nth(1).expect("a name").to_owned();
        let (_, dependencies) = text.split_once("\n[dependencies]\n").unwrap_or_default();
        let dependencies = dependencies.split("\n[").next().unwrap_or_default();
        let names = dependencies.lines().filter_map(|line| line.split(['.', ' ']).next());
        (name, names.map(str::to_owned).collect::<BTreeSet<String>>())
    });
    let all: BTreeMap<String, BTreeSet<String>> = manifests.collect();
    let ours = |it: &String| all.contains_key(it) && it != "wire";
    all.iter()
        .map(|(name, used)| (name.clone(), used.iter().filter(|it| ours(it)).cloned().collect()))
        .collect()
}

#[test]
fn the_map_names_every_dependency_between_crates() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).expect("a page");
    let (_, table) = text.split_once("crate                depends on\n").expect("the list");
    let table = table.split("```").next().expect("its end");
    let names = |text: &str| -> BTreeSet<String> {
        text.split(", ").map(|it| it.trim().to_owned()).filter(|it| !it.is_empty()).collect()
    };
    let dependencies = dependencies();
    let mut listed = BTreeSet::new();
    for line in table.lines() {
        let (crates, used) = line.split_once("   ").expect("two columns");
        for name in names(crates) {
            listed.insert(name.clone());
            let found = dependencies.get(&name).unwrap_or_else(|| panic!("no crate {name}"));
            let expected = match used.trim() {
                "no crate of ours" | "only wire" => BTreeSet::new(),
                "cli and the crates it measures" => continue,
                "all but agent-core, chat-template, forecast, line-programs and bench" => {
                    let left_out = [
                        "wire",
                        "agent-core",
                        "chat-template",
                        "forecast",
                        "line-programs",
                        "bench",
                        "cli",
                        "flotilla",
                    ];
                    let all = dependencies.keys().filter(|it| !left_out.contains(&it.as_str()));
                    all.cloned().collect()
                }
                used => names(used),
            };
            assert_eq!(*found, expected, "dependencies of {name}");
        }
    }
    assert_eq!(listed, dependencies.keys().cloned().collect(), "crates in ARCHITECTURE.md");
}
