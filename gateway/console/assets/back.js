// The page of an outage: asks for itself until it is back, ever more seldom, and then loads again.

const words = document.getElementById("back");
const MOST_S = 30;

async function isBack() {
  try {
    const answer = await fetch(location.href, { cache: "no-store", redirect: "manual", headers: { "Tollgate-Follows": "1" } });
    return answer.type === "opaqueredirect" || answer.status < 500;
  } catch {
    return false;
  }
}

const pause = (s) => new Promise((done) => setTimeout(done, s * 1000));

for (let wait = 2; ; wait = Math.min(MOST_S, wait * 1.5)) {
  words.textContent = `This page comes back by itself; the next look is in ${Math.round(wait)} s.`;
  await pause(wait);
  if (await isBack()) break;
}
location.reload();
