import { type Job, summaryOf } from "../../api/types";
import { formatBytes } from "../../format";
import { Code } from "../../ui/basics";

/** How to get the artifact and load it: the lines of each program that was seen to load such files. */
export function UseIt({ job }: { job: Job }) {
  const exports = Object.entries(summaryOf(job)?.exports ?? {});
  return (
    <section className="card" aria-label="Use it">
      <div className="row spread">
        <h2>Use it</h2>
        {job.artifact && (
          <a className="button primary" href={`/v1/jobs/${job.id}/artifacts.tar`} download>
            Download all files ({formatBytes(job.artifact.bytes)})
          </a>
        )}
      </div>
      <p>On the command line:</p>
      <Code text={`bitfoundry download ${job.id} model\ncd model`} label="Download command" />
      {exports.map(([name, { load, bytes, programs = {}, refusals = {} }]) => (
        <div key={name}>
          <h3>
            {name} <span className="faint">{formatBytes(bytes)}</span>
          </h3>
          {Object.keys(programs).length > 0 ? (
            <div className="columns">
              {Object.entries(programs).map(([program, lines]) => (
                <div key={program}>
                  <strong>{program}</strong>
                  <Code text={lines} label={`Load ${name} with ${program}`} />
                </div>
              ))}
            </div>
          ) : (
            <Code text={load} label={`Load ${name}`} />
          )}
          {Object.entries(refusals).map(([program, reason]) => (
            <p key={program}>{reason}</p>
          ))}
        </div>
      ))}
    </section>
  );
}
