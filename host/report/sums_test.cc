#include "host/report/sums.h"

#include <doctest/doctest.h>

#include "host/report/testing.h"

namespace sonde::host {

namespace {

// main -> a (3 calls) -> b (6), main -> b (1); a calls itself once below b.
Recording example() {
  Recording r = testing::recording({{}, {}});
  r.summed = true;
  SumTree& tree = r.sums[0];
  auto node = [&](uint32_t site, uint32_t parent, uint64_t calls, uint64_t total, uint64_t shortest, uint64_t longest) {
    SumTreeNode n;
    n.site = site, n.parent = parent, n.kinds[0] = calls, n.total = total, n.shortest = shortest, n.longest = longest;
    tree.nodes.push_back(n);
  };
  tree.nodes.emplace_back();
  node(0, 0, 1, 1000, 1000, 1000);
  node(1, 1, 3, 600, 100, 300);
  node(2, 2, 6, 240, 20, 60);
  node(2, 1, 1, 50, 50, 50);
  node(1, 3, 1, 30, 30, 30);
  r.sums[1] = tree;
  r.sums[1].nodes[1].elsewhere = 40;
  return r;
}

EntryOrder::Accept all() {
  return [](uint32_t, uint32_t) { return true; };
}

}  // namespace

TEST_CASE("sums: self time is what callees and displaced calls leave") {
  CallTree tree = tree_of_sums(example(), all(), {0, 1});
  const TreeNode& main = tree.node(tree.first_root(0));
  CHECK(main.total == 1000);
  CHECK(main.self == 1000 - 600 - 50);
  CHECK(tree.node(tree.first_root(1)).self == 1000 - 600 - 50 - 40);
  CHECK(tree.total(0) == 1000);
}

TEST_CASE("sums: threads of one group are added up") {
  CallTree tree = tree_of_sums(example(), all(), {0, 0});
  CHECK(tree.groups() == 1);
  CHECK(tree.node(tree.first_root(0)).calls == 2);
  CHECK(tree.nodes().size() == 5);
}

TEST_CASE("sums: what a view leaves out gives its time back to the next above") {
  CallTree tree =
      tree_of_sums(example(), [](uint32_t thread, uint32_t site) { return thread == 0 && site != 1; }, {0, 0});
  const TreeNode& main = tree.node(tree.first_root(0));
  CHECK(main.self == 1000 - 240 - 50);
  CHECK(tree.nodes().size() == 2);  // b below a and below main are the same path now
  CHECK(tree.node(main.first_child).calls == 7);
}

TEST_CASE("sums: a function's total counts its outermost calls, its extremes all") {
  auto functions = functions_of_sums(example(), [](uint32_t thread, uint32_t) { return thread == 0; });
  CHECK(functions[1].calls == 4);
  CHECK(functions[1].total == 600);
  CHECK(functions[1].sum == 630);
  CHECK(functions[1].self == 600 - 240 + 30);
  CHECK(functions[1].min == 30);
  CHECK(functions[1].max == 300);
  CHECK(functions[2].calls == 7);
  CHECK(functions[2].total == 290);
}

TEST_CASE("sums: the survey counts calls of known sites by how they ended") {
  Recording r = example();
  r.sums[0].nodes[2].kinds[static_cast<size_t>(ExitKind::unwound)] = 2;
  r.sums[0].nodes[4].site = 99;
  Survey survey = survey_sums(r);
  CHECK(survey.calls == 12 - 1 + 12 + 2);
  CHECK(survey.kinds[static_cast<size_t>(ExitKind::unwound)] == 2);
  CHECK(survey.sites[1].calls == 4 + 4 + 2);
  CHECK(survey.bad_records == 1);
}

}  // namespace sonde::host
